#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "types.h"

namespace fsccl {
namespace {

std::string mib(size_t bytes) { return std::to_string(ceil_div(bytes, size_t{1} << 20)) + " MiB"; }

std::string name_of_place(const std::string& directory) {
  return directory.empty() ? "memory" : directory;
}

[[noreturn]] void fail_reserving(size_t bytes, const std::string& where) {
  fail_system("cannot reserve " + mib(bytes) + " of shared memory in " + where);
}

struct flock rank_byte(int rank) {
  struct flock l{};
  l.l_type = F_WRLCK;
  l.l_whence = SEEK_SET;
  l.l_start = rank;
  l.l_len = 1;
  return l;
}

}  // namespace

Segment Segment::create(size_t bytes, size_t first, const std::string& directory) {
  const std::string where = name_of_place(directory);
  const int fd = directory.empty()
                     ? memfd_create("fsccl", MFD_CLOEXEC)
                     : ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) fail_system("cannot create a shared segment in " + where);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int code = errno;
    close(fd);
    errno = code;
    fail_reserving(bytes, where);
  }
  Segment made(fd, bytes, where);
  made.reserve(0, first);
  return made;
}

Segment Segment::open(const std::string& address, size_t bytes, const std::string& directory) {
  const int fd = ::open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail_system("cannot open the shared segment " + address);
  return Segment(fd, bytes, name_of_place(directory));
}

size_t Segment::whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return ceil_div(bytes, page) * page;
}

void Segment::reserve(size_t lo, size_t hi) const {
  const int code = posix_fallocate(fd_, static_cast<off_t>(lo), static_cast<off_t>(hi - lo));
  if (code == 0) return;
  errno = code;
  fail_reserving(hi - lo, where_);
}

Segment::Segment(int fd, size_t bytes, std::string where)
    : fd_(fd), where_(std::move(where)), bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    close(fd);
    fail_system("cannot map " + mib(bytes) + " of shared memory");
  }
  data_ = static_cast<std::byte*>(at);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      where_(std::move(other.where_)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::string Segment::address() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
}

void Segment::lock_rank(int rank) {
  struct flock l = rank_byte(rank);
  if (fcntl(fd_, F_SETLK, &l) != 0) fail_system("cannot mark this rank as alive");
}

bool Segment::rank_is_locked(int rank) const {
  struct flock l = rank_byte(rank);
  return fcntl(fd_, F_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

}  // namespace fsccl
