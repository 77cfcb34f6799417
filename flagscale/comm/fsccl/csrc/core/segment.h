// Shared memory segment of the ranks of one host.
//
// It is an unnamed file (memfd, or O_TMPFILE in FSCCL_SHM_DIR), which peers open through
// /proc/<pid>/fd. So a killed process leaves no files in /dev/shm, and the size of /dev/shm, which
// is small in containers, does not matter.
//
// Pages are reserved (allocated) before they are used, so that a lack of memory is reported as an
// error at that point, and not by SIGBUS later. The kernel allocates them on the NUMA node of the
// thread that reserves them (unless the program has set another policy). So every rank reserves the
// pages that it will write, and ranks bound to a NUMA node write to local memory.
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
  // Creates the file (with memfd if `directory` is empty) and reserves its first `reserved_bytes`
  // bytes. Throws Error(kSystem), before any other rank has the address of the segment.
  static Segment create(size_t bytes, size_t reserved_bytes, const std::string& directory);
  // Maps a segment of another process (or of this one), given its address(). Throws Error(kSystem).
  static Segment open(const std::string& address, size_t bytes, const std::string& directory);
  // Rounds up to whole pages.
  static size_t round_to_pages(size_t bytes);

  // Allocates the pages of [begin, end) that are not allocated yet, from the memory closest to this
  // thread. Throws Error(kSystem) if there is no memory left.
  void reserve(size_t begin, size_t end) const;

  std::byte* data() const { return file_->data; }
  size_t bytes() const { return file_->bytes; }
  std::string address() const;  // "/proc/<pid>/fd/<fd>"

  // Locks the byte of this rank, which rank_is_locked() queries on the other ranks.
  void lock_rank(int rank);
  bool rank_is_locked(int rank) const;  // by another process

  // Keeps the segment open in this process until all_opened() returns true, also if all Segment
  // objects are destroyed, because other ranks may have yet to open it.
  void retain_until(std::function<bool()> all_opened) const;
  // Waits until no segment is kept by retain_until(), at most `timeout`. Called before the process
  // ends.
  static void wait_until_released(std::chrono::milliseconds timeout);

 private:
  // The open file and its mapping; closed with the last copy of the segment.
  struct File {
    File(int fd_of_file, size_t bytes_of_file, std::string directory);
    ~File();
    const int fd;
    const std::string directory_name;  // for messages
    const size_t bytes;
    std::byte* data = nullptr;
  };
  struct Registry;

  explicit Segment(std::shared_ptr<File> file) : file_(std::move(file)) {}
  static std::shared_ptr<File> map(int fd, size_t bytes, const std::string& directory_name);

  std::shared_ptr<File> file_;
};

// Returns the start time of a process, which distinguishes it from a later one with the same pid; 0
// if it has ended or /proc is not readable.
uint64_t start_time_of(int pid);
// Returns whether the process with this pid and start time runs; true if that cannot be found out,
// as without a free descriptor.
bool is_process_running(int pid, uint64_t start_time);

}  // namespace fsccl
