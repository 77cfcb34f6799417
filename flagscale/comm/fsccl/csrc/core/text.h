// Reading text without the standard library's streams: with torch's CUDA wheel on Ubuntu 24.04 they
// were seen to read nothing in a process that had loaded torch, as if their locale belonged to
// another copy of the C++ runtime.
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

// The parts between separators; what ends with one has no empty part behind it.
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

// Whether it is a decimal number that `out` can hold, blanks before it aside.
template <class T>
bool read_number(const std::string& text, T* out) {
  const char* const end = text.data() + text.size();
  const size_t blanks = std::min(text.find_first_not_of(' '), text.size());
  const auto read = std::from_chars(text.data() + blanks, end, *out);
  return read.ec == std::errc() && read.ptr == end;
}

// 32 hexadecimal digits.
inline bool read_key(const std::string& text, Key* out) {
  const auto half = [&text](size_t from, uint64_t* to) {
    const char* const at = text.data() + from;
    return std::from_chars(at, at + 16, *to, 16).ptr == at + 16;
  };
  return text.size() == 32 && half(0, &out->lo) && half(16, &out->hi);
}
inline std::string text_of(const Key& key) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(key.lo),
                static_cast<unsigned long long>(key.hi));
  return text;
}

constexpr char kBootId[] = "/proc/sys/kernel/random/boot_id";

// Of a small file of the kernel's, such as its boot's name; empty if it cannot be read.
inline std::string first_line(const std::string& path) {
  char text[1024];
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  const ssize_t size = read(file, text, sizeof text);
  close(file);
  const std::string all(text, size > 0 ? static_cast<size_t>(size) : 0);
  return all.substr(0, all.find('\n'));
}

}  // namespace fsccl
