// Bytes of a file to where they belong in memory, through a buffer that stays in the core's cache.
//
// A direct read needs memory that is aligned like the disk, which values in the middle of a file
// are not. Here and not in Python, because small pieces would wait for the interpreter's lock. As
// in disk_pieces.cpp only what goes well is done; the rest is left to the caller.

#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "outcore_kernels.h"

namespace {

// Copies what the runs want of bytes [start, end), which lie at the front of the buffer.
void hand_out(const unsigned char* buffer, int64_t start, int64_t end, const oc_copy_run* runs,
              int64_t num_runs) {
  for (int64_t i = 0; i < num_runs; ++i) {
    const int64_t first = std::max(start, runs[i].start), last = std::min(end, runs[i].end);
    if (first >= last) continue;
    memcpy(static_cast<unsigned char*>(runs[i].memory) + (first - runs[i].start),
           buffer + (first - start), last - first);
  }
}

}  // namespace

extern "C" int oc_read_and_copy(int fd, int64_t offset, int64_t num_bytes, void* buffer,
                                int64_t buffer_bytes, const oc_copy_run* runs, int64_t num_runs,
                                int64_t* num_done) {
  if (buffer == nullptr || runs == nullptr || num_done == nullptr) return OC_ERROR_NULL;
  if (offset < 0 || num_bytes < 0 || num_runs < 0 || buffer_bytes <= 0 ||
      buffer_bytes % OC_PAGE_BYTES != 0) {
    return OC_ERROR_SIZE;
  }
  for (int64_t i = 0; i < num_runs; ++i) {
    if (runs[i].memory == nullptr) return OC_ERROR_NULL;
    if (runs[i].start < 0 || runs[i].end > num_bytes) return OC_ERROR_SIZE;
  }
  *num_done = 0;
  while (*num_done < num_bytes) {
    const int64_t wanted = std::min(buffer_bytes, num_bytes - *num_done);
    const int64_t pages = (wanted + OC_PAGE_BYTES - 1) / OC_PAGE_BYTES;
    if (pread(fd, buffer, pages * OC_PAGE_BYTES, offset + *num_done) < wanted) break;
    hand_out(static_cast<unsigned char*>(buffer), *num_done, *num_done + wanted, runs, num_runs);
    *num_done += wanted;
  }
  return OC_OK;
}
