#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "per_process.h"
#include "text.h"
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

// What this process has mapped, by its address, and what it keeps for others.
struct Segment::Known {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<File>> mapped;
  std::list<std::pair<std::shared_ptr<File>, std::function<bool()>>> kept;

  bool keeps() {
    kept.remove_if([](const auto& one) { return one.second(); });
    return !kept.empty();
  }
};

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
  Segment made(map(fd, bytes, where));
  made.reserve(0, first);
  return made;
}

Segment Segment::open(const std::string& address, size_t bytes, const std::string& directory) {
  {
    auto& k = per_process<Known>();
    const std::lock_guard<std::mutex> hold(k.mutex);
    const auto own = k.mapped.find(address);
    if (own != k.mapped.end()) {
      if (auto file = own->second.lock()) return Segment(std::move(file));
    }
  }
  const int fd = ::open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail_system("cannot open the shared segment " + address);
  return Segment(map(fd, bytes, name_of_place(directory)));
}

std::shared_ptr<Segment::File> Segment::map(int fd, size_t bytes, const std::string& where) {
  auto file = std::make_shared<File>(fd, bytes, where);
  auto& k = per_process<Known>();
  const std::lock_guard<std::mutex> hold(k.mutex);
  for (auto one = k.mapped.begin(); one != k.mapped.end();) {
    one = one->second.expired() ? k.mapped.erase(one) : std::next(one);
  }
  k.mapped[Segment(file).address()] = file;
  return file;
}

void Segment::keep_until(std::function<bool()> opened) const {
  auto& k = per_process<Known>();
  const std::lock_guard<std::mutex> hold(k.mutex);
  k.kept.emplace_back(file_, std::move(opened));
  k.keeps();
}

void Segment::await_kept(std::chrono::milliseconds limit) {
  const Deadline end = Deadline::after(limit);
  auto& k = per_process<Known>();
  for (;;) {
    {
      const std::lock_guard<std::mutex> hold(k.mutex);
      if (!k.keeps() || end.passed()) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

size_t Segment::whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return ceil_div(bytes, page) * page;
}

void Segment::reserve(size_t lo, size_t hi) const {
  const int code = posix_fallocate(file_->fd, static_cast<off_t>(lo), static_cast<off_t>(hi - lo));
  if (code == 0) return;
  errno = code;
  fail_reserving(hi - lo, file_->where);
}

Segment::File::File(int fd_of_file, size_t size, std::string place)
    : fd(fd_of_file), where(std::move(place)), bytes(size) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    close(fd);
    fail_system("cannot map " + mib(bytes) + " of shared memory");
  }
  data = static_cast<std::byte*>(at);
}

Segment::File::~File() {
  munmap(data, bytes);
  close(fd);
}

std::string Segment::address() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_->fd);
}

void Segment::lock_rank(int rank) {
  struct flock l = rank_byte(rank);
  if (fcntl(file_->fd, F_SETLK, &l) != 0) fail_system("cannot mark this rank as alive");
}

bool Segment::rank_is_locked(int rank) const {
  struct flock l = rank_byte(rank);
  return fcntl(file_->fd, F_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

// Field 22 of /proc/<pid>/stat, the second after the name, which may hold anything, being the
// state: a process that has ended and is not waited for yet has none either.
uint64_t start_time_of(int pid) {
  const std::string line = first_line("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_ends = line.rfind(')');
  if (name_ends == std::string::npos || name_ends + 2 >= line.size()) return 0;
  const std::vector<std::string> fields = split(line.substr(name_ends + 2), ' ');
  uint64_t start = 0;
  const bool sound =
      fields.size() > 19 && fields[0] != "Z" && fields[0] != "X" && read_number(fields[19], &start);
  return sound ? start : 0;
}

}  // namespace fsccl
