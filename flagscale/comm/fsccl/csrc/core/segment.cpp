#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
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

std::string mib_text(size_t bytes) {
  return std::to_string(ceil_div(bytes, size_t{1} << 20)) + " MiB";
}

std::string name_of_directory(const std::string& directory) {
  return directory.empty() ? "memory" : directory;
}

[[noreturn]] void fail_reserving(size_t bytes, const std::string& directory_name) {
  fail_system("cannot reserve " + mib_text(bytes) + " of shared memory in " + directory_name);
}

// Returns an exclusive lock of the byte of a rank.
struct flock rank_byte(int rank) {
  struct flock l{};
  l.l_type = F_WRLCK;
  l.l_whence = SEEK_SET;
  l.l_start = rank;
  l.l_len = 1;
  return l;
}

}  // namespace

// The segments that this process has mapped, by address, and those that it retains for others.
struct Segment::Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<File>> mapped;
  std::list<std::pair<std::shared_ptr<File>, std::function<bool()>>> retained;

  bool has_retained() {
    retained.remove_if([](const auto& entry) { return entry.second(); });
    return !retained.empty();
  }
};

Segment Segment::create(size_t bytes, size_t reserved_bytes, const std::string& directory) {
  const std::string directory_name = name_of_directory(directory);
  const int fd = directory.empty()
                     ? memfd_create("fsccl", MFD_CLOEXEC)
                     : ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) fail_system("cannot create a shared segment in " + directory_name);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int saved_errno = errno;
    close(fd);
    errno = saved_errno;
    fail_reserving(bytes, directory_name);
  }
  Segment segment(map(fd, bytes, directory_name));
  segment.reserve(0, reserved_bytes);
  return segment;
}

Segment Segment::open(const std::string& address, size_t bytes, const std::string& directory) {
  {
    auto& registry = per_process<Registry>();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    const auto entry = registry.mapped.find(address);
    if (entry != registry.mapped.end()) {
      if (auto file = entry->second.lock()) return Segment(std::move(file));
    }
  }
  const int fd = ::open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    const std::string message = "cannot open the shared segment " + address;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) fail_system(message);
    throw Error(Fault::kPeerLost, -1, message + ": " + std::strerror(errno));
  }
  return Segment(map(fd, bytes, name_of_directory(directory)));
}

std::shared_ptr<Segment::File> Segment::map(int fd, size_t bytes,
                                            const std::string& directory_name) {
  auto file = std::make_shared<File>(fd, bytes, directory_name);
  auto& registry = per_process<Registry>();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (auto entry = registry.mapped.begin(); entry != registry.mapped.end();) {
    entry = entry->second.expired() ? registry.mapped.erase(entry) : std::next(entry);
  }
  registry.mapped[Segment(file).address()] = file;
  return file;
}

void Segment::retain_until(std::function<bool()> all_opened) const {
  auto& registry = per_process<Registry>();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.retained.emplace_back(file_, std::move(all_opened));
  registry.has_retained();
}

void Segment::wait_until_released(std::chrono::milliseconds timeout) {
  const Deadline end = Deadline::after(timeout);
  auto& registry = per_process<Registry>();
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(registry.mutex);
      if (!registry.has_retained() || end.passed()) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

size_t Segment::round_to_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return ceil_div(bytes, page) * page;
}

void Segment::reserve(size_t begin, size_t end) const {
  const int error_code =
      posix_fallocate(file_->fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  if (error_code == 0) return;
  errno = error_code;
  fail_reserving(end - begin, file_->directory_name);
}

Segment::File::File(int fd_of_file, size_t bytes_of_file, std::string directory)
    : fd(fd_of_file), directory_name(std::move(directory)), bytes(bytes_of_file) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    close(fd);
    fail_system("cannot map " + mib_text(bytes) + " of shared memory");
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

namespace {

std::string stat_path_of(int pid) { return "/proc/" + std::to_string(pid) + "/stat"; }

// Returns the start time in a line of /proc/<pid>/stat: its field 22. The name (field 2) may contain
// any characters; the state follows it. A process that has ended but has not been waited for
// (zombie) counts as ended: 0.
uint64_t parse_start_time(const std::string& line) {
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return 0;
  const std::vector<std::string> fields = split(line.substr(name_end + 2), ' ');
  uint64_t start = 0;
  const bool valid = fields.size() > 19 && fields[0] != "Z" && fields[0] != "X" &&
                     parse_decimal(fields[19], &start);
  return valid ? start : 0;
}

}  // namespace

uint64_t start_time_of(int pid) { return parse_start_time(read_first_line(stat_path_of(pid))); }

bool is_process_running(int pid, uint64_t start_time) {
  errno = 0;
  const std::string line = read_first_line(stat_path_of(pid));
  if (line.empty()) return errno != ENOENT && errno != ESRCH;
  return parse_start_time(line) == start_time;
}

}  // namespace fsccl
