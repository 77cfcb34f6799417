// Text parsing: numbers, keys, lists, small files of the kernel. It avoids the streams of the
// standard library. With torch's CUDA wheel on Ubuntu 24.04, streams were observed to read nothing
// in a process that had loaded torch, as if their locale belonged to another copy of the C++
// runtime.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string>
#include <system_error>
#include <vector>

#include "mac.h"

namespace fsccl {

// Splits a text at each `separator`. A trailing separator does not add an empty last part.
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> out;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(separator, start), text.size());
    out.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return out;
}

// Parses a decimal number after optional leading blanks. Returns false unless the whole text is a
// number that `out` can hold.
template <class T>
bool parse_decimal(const std::string& text, T* out) {
  const char* const end = text.data() + text.size();
  const size_t leading_blanks = std::min(text.find_first_not_of(' '), text.size());
  const auto result = std::from_chars(text.data() + leading_blanks, end, *out);
  return result.ec == std::errc() && result.ptr == end;
}

// Parses 32 hexadecimal digits; the inverse of text_of().
inline bool parse_key(const std::string& text, Key* out) {
  const auto read_half = [&text](size_t from, uint64_t* to) {
    const char* const at = text.data() + from;
    return std::from_chars(at, at + 16, *to, 16).ptr == at + 16;
  };
  return text.size() == 32 && read_half(0, &out->lo) && read_half(16, &out->hi);
}
inline std::string text_of(const Key& key) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(key.lo),
                static_cast<unsigned long long>(key.hi));
  return text;
}

constexpr char kBootId[] = "/proc/sys/kernel/random/boot_id";

// Returns the first line of a small file of the kernel, such as the boot ID; empty if it cannot be
// read.
inline std::string read_first_line(const std::string& path) {
  char text[1024];
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  const ssize_t size = read(file, text, sizeof text);
  close(file);
  const std::string content(text, size > 0 ? static_cast<size_t>(size) : 0);
  return content.substr(0, content.find('\n'));
}

}  // namespace fsccl
