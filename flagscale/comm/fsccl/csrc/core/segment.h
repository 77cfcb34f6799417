// A piece of memory that the ranks of one host share.
//
// It is a file without a name (memfd, or O_TMPFILE in FSCCL_SHM_DIR), which peers open through
// /proc/<pid>/fd: there is nothing in /dev/shm that a killed process could leave behind, and a
// container's small /dev/shm does not limit it.
//
// Its pages are reserved before they are used, so that memory that runs out is an error then and
// not a SIGBUS later. The kernel takes them from the NUMA node of the thread that reserves them
// (unless the program has set another policy): so every rank reserves what it will write, and ranks
// that are bound to a node write to their own memory.
//
// Every rank holds a POSIX record lock on "its" byte of the file. The kernel drops it when the
// process ends, however it ends, and not when a child forked from it ends: asking for the lock's
// holder tells whether a rank is alive, with no pid that could be reused.
#pragma once

#include <cstddef>
#include <string>

namespace fsccl {

class Segment {
 public:
  // Makes the file, `directory` empty for memfd, and reserves its `first` bytes: before
  // others are told of it, so that they need not learn of a failure here. Throws Error(kSystem).
  static Segment create(size_t bytes, size_t first, const std::string& directory);
  // Maps what another process (or this one) made there and described by address().
  static Segment open(const std::string& address, size_t bytes, const std::string& directory);
  static size_t whole_pages(size_t bytes);

  // Takes the pages of [lo, hi) from the memory nearest to this thread, those that nobody has taken
  // yet. Throws Error(kSystem) when there is none left.
  void reserve(size_t lo, size_t hi) const;

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  std::string address() const;  // "/proc/<pid>/fd/<fd>"

  void lock_rank(int rank);
  bool rank_is_locked(int rank) const;  // by another process

 private:
  Segment(int fd, size_t bytes, std::string where);
  int fd_ = -1;
  std::string where_;  // for messages
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace fsccl
