// Records between memory and a file, in pieces on a few threads, with the checksums of their pages.
//
// Here and not in Python, because each request would wait several times for the interpreter's lock,
// and a disk is idle meanwhile. Only what goes well is done here: a piece that moves in part or not
// at all is left to the caller, who can say what is wrong.

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "outcore_kernels.h"

namespace {

constexpr int kMaxThreads = 64;

enum class Direction { kRead, kWrite };

struct Transfer {
  Direction direction;
  int fd;
  oc_disk_record* records;
  int64_t num_records;
  int64_t piece_bytes;
  std::atomic<int64_t> next{0};  // piece, counted over all records
  std::atomic<bool> is_hindered{false};

  int64_t num_pieces(const oc_disk_record& record) const {
    return (record.num_bytes + piece_bytes - 1) / piece_bytes;
  }
};

// Returns whether the piece moved as a whole, with its checksum added.
bool move_piece(const Transfer& transfer, oc_disk_record& record, int64_t piece) {
  const int64_t start = piece * transfer.piece_bytes;
  const int64_t size = std::min(transfer.piece_bytes, record.num_bytes - start);
  unsigned char* memory = static_cast<unsigned char*>(record.memory) + start;
  const uint64_t first_page = static_cast<uint64_t>(start / OC_PAGE_BYTES);
  uint64_t sum = 0;
  if (transfer.direction == Direction::kRead) {
    if (pread(transfer.fd, memory, size, record.offset + start) != size) return false;
    oc_checksum_pages(memory, size / OC_PAGE_BYTES, first_page, record.seed, &sum);
  } else {
    oc_checksum_pages(memory, size / OC_PAGE_BYTES, first_page, record.seed, &sum);
    if (pwrite(transfer.fd, memory, size, record.offset + start) != size) return false;
  }
  __atomic_fetch_add(&record.sum, sum, __ATOMIC_RELAXED);
  record.is_done[piece] = 1;
  return true;
}

void* move_pieces(void* argument) {
  Transfer& transfer = *static_cast<Transfer*>(argument);
  while (!transfer.is_hindered) {
    int64_t piece = transfer.next++, i = 0;
    while (i < transfer.num_records && piece >= transfer.num_pieces(transfer.records[i])) {
      piece -= transfer.num_pieces(transfer.records[i++]);
    }
    if (i == transfer.num_records) break;
    if (!move_piece(transfer, transfer.records[i], piece)) transfer.is_hindered = true;
  }
  return nullptr;
}

int move_records(Transfer& transfer, int threads) {
  if (transfer.records == nullptr) return OC_ERROR_NULL;
  if (transfer.num_records < 0 || transfer.piece_bytes <= 0 ||
      transfer.piece_bytes % OC_PAGE_BYTES != 0) {
    return OC_ERROR_SIZE;
  }
  if (threads < 1) return OC_ERROR_THREADS;
  int64_t num_pieces = 0;
  for (int64_t i = 0; i < transfer.num_records; ++i) {
    oc_disk_record& record = transfer.records[i];
    if (record.memory == nullptr || record.is_done == nullptr) return OC_ERROR_NULL;
    if (record.num_bytes < 0 || record.num_bytes % OC_PAGE_BYTES != 0 || record.offset < 0) {
      return OC_ERROR_SIZE;
    }
    record.sum = 0;
    std::fill_n(record.is_done, transfer.num_pieces(record), 0);
    num_pieces += transfer.num_pieces(record);
  }
  pthread_t others[kMaxThreads];
  int num_others = 0;
  const int64_t wanted = std::min<int64_t>({num_pieces, threads, kMaxThreads}) - 1;
  while (num_others < wanted &&
         pthread_create(&others[num_others], nullptr, move_pieces, &transfer) == 0) {
    ++num_others;
  }
  move_pieces(&transfer);  // the calling thread too: alone, where no other can be started
  for (int i = 0; i < num_others; ++i) pthread_join(others[i], nullptr);
  return OC_OK;
}

}  // namespace

extern "C" int oc_read_records(int fd, oc_disk_record* records, int64_t num_records,
                               int64_t piece_bytes, int threads) {
  Transfer transfer{Direction::kRead, fd, records, num_records, piece_bytes};
  return move_records(transfer, threads);
}

extern "C" int oc_write_records(int fd, oc_disk_record* records, int64_t num_records,
                                int64_t piece_bytes, int threads) {
  Transfer transfer{Direction::kWrite, fd, records, num_records, piece_bytes};
  return move_records(transfer, threads);
}
