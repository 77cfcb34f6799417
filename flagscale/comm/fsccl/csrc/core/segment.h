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
// holder tells whether a rank is alive, with no pid that could be reused. The kernel also drops it
// when the process closes any descriptor of the file: ranks that are threads of one process share
// one descriptor, and one mapping.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

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

  std::byte* data() const { return file_->data; }
  size_t bytes() const { return file_->bytes; }
  std::string address() const;  // "/proc/<pid>/fd/<fd>"

  void lock_rank(int rank);
  bool rank_is_locked(int rank) const;  // by another process

  // Who made it can go before others have opened it: it is kept, by this process, until `opened`.
  void keep_until(std::function<bool()> opened) const;
  // Before the process ends: waits until nothing is kept any more, at most `limit`.
  static void await_kept(std::chrono::milliseconds limit);

 private:
  struct File {
    File(int fd_of_file, size_t size, std::string place);
    ~File();
    const int fd;
    const std::string where;  // for messages
    const size_t bytes;
    std::byte* data = nullptr;
  };
  struct Known;

  explicit Segment(std::shared_ptr<File> file) : file_(std::move(file)) {}
  static std::shared_ptr<File> map(int fd, size_t bytes, const std::string& where);

  std::shared_ptr<File> file_;
};

// Of a process, whether it or a younger one has its number; 0 where /proc does not tell.
uint64_t start_time_of(int pid);

}  // namespace fsccl
