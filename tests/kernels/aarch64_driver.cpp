// Makes the calls of a script on stdin and writes to stdout what they left behind, so that a
// library that this machine can only emulate is tested from Python; aarch64_script.py is the other
// half. It knows no kernel but by the header: what is called with which numbers is the script's.
//
// A script, in little-endian 64-bit words and plain bytes:
//
//   number of buffers; for each one its size and its bytes
//   number of calls; for each one the size of its name, its name, the number of its arguments, and
//   two words for each argument: (0, number) or (buffer, counted from 1; place in it)
//
// The answer: one word for each call, what it returned, and then the bytes of all buffers.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "outcore_kernels.h"

namespace {

using Words = std::vector<uint64_t>;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

// ---------------------------------------------------------------------------------------------
// One call
// ---------------------------------------------------------------------------------------------

template <typename Argument>
Argument argument_of(uint64_t word) {
  if constexpr (std::is_pointer_v<Argument>) {
    return reinterpret_cast<Argument>(word);
  } else {
    return static_cast<Argument>(word);
  }
}

uint64_t word_of(int status) { return static_cast<uint64_t>(int64_t{status}); }

// A name is told by its first eight characters.
uint64_t word_of(const char* name) {
  uint64_t word = 0;
  std::memcpy(&word, name, std::min(std::strlen(name), sizeof word));
  return word;
}

template <typename Result, typename... Arguments, size_t... kPlaces>
uint64_t call(Result (*function)(Arguments...), const Words& words,
              std::index_sequence<kPlaces...>) {
  return word_of(function(argument_of<Arguments>(words[kPlaces])...));
}

template <typename Result, typename... Arguments>
uint64_t call(Result (*function)(Arguments...), const Words& words) {
  if (words.size() != sizeof...(Arguments)) fail("wrong number of arguments");
  return call(function, words, std::index_sequence_for<Arguments...>());
}

#define OC_ENTRY(name) {#name, [](const Words& words) { return call(name, words); }}

const std::map<std::string, uint64_t (*)(const Words&)> kFunctions = {
    OC_ENTRY(oc_abi_version),    OC_ENTRY(oc_isa),          OC_ENTRY(oc_set_isa),
    OC_ENTRY(oc_adamw_split),    OC_ENTRY(oc_adamw_fp32),   OC_ENTRY(oc_adamw_compact),
    OC_ENTRY(oc_adamw_minimal),  OC_ENTRY(oc_split_master), OC_ENTRY(oc_join_master),
    OC_ENTRY(oc_checksum_pages),
};

// ---------------------------------------------------------------------------------------------
// The script
// ---------------------------------------------------------------------------------------------

void read_bytes(void* bytes, size_t size) {
  if (std::fread(bytes, 1, size, stdin) != size) fail("the script ends early");
}

uint64_t read_word() {
  uint64_t word;
  read_bytes(&word, sizeof word);
  return word;
}

std::string read_string() {
  std::string bytes(read_word(), '\0');
  read_bytes(bytes.data(), bytes.size());
  return bytes;
}

void write_bytes(const void* bytes, size_t size) {
  if (std::fwrite(bytes, 1, size, stdout) != size) fail("the answer cannot be written");
}

}  // namespace

int main() {
  std::vector<std::string> buffers(read_word());
  for (std::string& buffer : buffers) buffer = read_string();

  Words results(read_word());
  for (uint64_t& result : results) {
    const std::string name = read_string();
    Words words(read_word());
    for (uint64_t& word : words) {
      const uint64_t buffer = read_word();
      word = read_word();
      if (buffer > 0) word += reinterpret_cast<uint64_t>(buffers.at(buffer - 1).data());
    }
    const auto function = kFunctions.find(name);
    if (function == kFunctions.end()) fail("no function " + name);
    result = function->second(words);
  }

  write_bytes(results.data(), results.size() * sizeof results[0]);
  for (const std::string& buffer : buffers) write_bytes(buffer.data(), buffer.size());
}
