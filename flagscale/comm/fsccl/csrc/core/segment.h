// A piece of memory that the ranks of one host share.
//
// It is a file without a name (memfd, or O_TMPFILE in FSCCL_SHM_DIR), which peers open through
// /proc/<pid>/fd: there is nothing in /dev/shm that a killed process could leave behind, and a
// container's small /dev/shm does not limit it. Its pages are reserved when it is made, so that
// memory that runs out is an error then and not a SIGBUS later.
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
  // Makes the file, `directory` empty for memfd. Throws Error(kSystem).
  static Segment create(size_t bytes, const std::string& directory);
  // Maps what another process (or this one) made and described by address().
  static Segment open(const std::string& address, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  std::string address() const;  // "/proc/<pid>/fd/<fd>"

  void lock_rank(int rank);
  bool rank_is_locked(int rank) const;  // by another process

 private:
  Segment(int fd, size_t bytes);
  int fd_ = -1;
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace fsccl
