// A piece of memory that the ranks of one host share.
//
// It is a file without a name (memfd, or O_TMPFILE in FSCCL_SHM_DIR), which peers open through
// /proc/<pid>/fd. A killed process leaves nothing behind in /dev/shm, and the small /dev/shm of a
// container is no limit.
//
// Pages are reserved before they are used, so that a lack of memory is an error at that point, and
// not a SIGBUS later. The kernel takes them from the NUMA node of the thread that reserves them
// (unless the program has set another policy). So every rank reserves the pages that it will write,
// and ranks bound to a NUMA node write to local memory.
//
// Every rank holds a POSIX record lock on its own byte of the file. The kernel releases the lock
// when the process ends, however it ends, but not when a child forked from it ends. Querying the
// holder of the lock therefore shows whether a rank is alive, without a pid that could be reused.
// The kernel also releases the lock when the process closes any descriptor of the file; so ranks
// that are threads of one process share one descriptor and one mapping.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace fsccl {

// A mapped segment. Copies share the mapping. Any thread may call.
class Segment {
 public:
  // Creates the file (with memfd if `directory` is empty) and reserves its first `first` bytes,
  // before other ranks get its address, so that they need not handle a failure here. Throws
  // Error(kSystem).
  static Segment create(size_t bytes, size_t first, const std::string& directory);
  // Maps a segment of another process (or of this one), given its address().
  static Segment open(const std::string& address, size_t bytes, const std::string& directory);
  // Rounds up to whole pages.
  static size_t round_to_pages(size_t bytes);

  // Allocates the pages of [begin, end) that are not allocated yet, from the memory closest to this
  // thread. Throws Error(kSystem) if there is no memory left.
  void reserve(size_t begin, size_t end) const;

  std::byte* data() const { return file_->data; }
  size_t bytes() const { return file_->bytes; }
  std::string address() const;  // "/proc/<pid>/fd/<fd>"

  // Locks the byte of this rank, for rank_is_locked() on the others.
  void lock_rank(int rank);
  bool rank_is_locked(int rank) const;  // by another process

  // Keeps the segment in this process, until `all_opened` returns true, although its creator drops
  // it: other ranks may have yet to open it.
  void retain_until(std::function<bool()> all_opened) const;
  // Waits until this process retains no segment, at most `timeout`. Called before the process ends.
  static void wait_until_released(std::chrono::milliseconds timeout);

 private:
  // The open file and its mapping; closed with the last copy of the segment.
  struct File {
    File(int fd_of_file, size_t size, std::string directory);
    ~File();
    const int fd;
    const std::string where;  // for messages
    const size_t bytes;
    std::byte* data = nullptr;
  };
  struct Registry;

  explicit Segment(std::shared_ptr<File> file) : file_(std::move(file)) {}
  static std::shared_ptr<File> map(int fd, size_t bytes, const std::string& where);

  std::shared_ptr<File> file_;
};

// Returns the start time of a process, which distinguishes it from a later one with the same pid; 0
// if it has ended or /proc is not readable.
uint64_t start_time_of(int pid);

}  // namespace fsccl
