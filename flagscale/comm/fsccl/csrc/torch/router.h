// Router: chooses the library that runs an operation, and owns what it chooses between. These are
// the core group (core/group.h: host memory), the native library's backends (such as NCCL's), the
// device engine (device/engine.h: ranks with different native libraries), and the connection to the
// NVLink engine (nvlink/engine.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../device/engine.h"
#include "../device/stream_watchdog.h"
#include "convert.h"
#include "nvlink_path.h"
#include "operation_queue.h"

namespace fsccl {

// The choice is the same on all ranks of a group, because it follows from the identities that they
// have published and from properties that are the same in all of their calls:
// - Every rank uses its CPU: the core group.
// - Every rank uses a device: the core group for CPU tensors; for device tensors the NVLink engine,
//   or the native library, if all ranks have the same one, else the device engine.
// - Some ranks use a CPU and some a device: the device engine for all tensors, which are copied to
//   the rank's device first.
//
// Libraries and connections are created by the first operation that needs them, in which all ranks
// take part.
//
// lock() guards the creation of libraries, and the use of the device engine by calls on devices.
// Methods document whether the caller must hold it.
class Router {
 public:
  enum class GroupKind { kHost, kDevice, kMixed };

  // `native` describes this rank's native library; `make_native` creates that library's backend for
  // this rank's native cluster, the ranks that have the same library.
  Router(OperationQueue& queue, NativeLibrary native, DeviceEngine::MakeNative make_native);

  // Returns whether this rank's collectives work in host memory.
  bool on_host() const;
  // Returns whether the group's ranks use host memory, devices or both. Waits until all ranks are
  // known.
  GroupKind group_kind();
  // Returns the device on which an operation of a tensor runs. Throws if this rank does not support
  // the tensor's device.
  Placement placement_of(const at::Tensor& t, const char* op);
  // Returns the native library's backend over all ranks, if it runs operations of this tensor; else
  // null.
  NativePtr group_native(const at::Tensor& t);
  const std::string& native_library() const { return native_.library; }
  // Returns the connection to the NVLink engine, if all ranks have the same native library and
  // their GPUs are linked to each other; else null. The first call with a CUDA tensor connects.
  NvlinkPath* nvlink_path(const at::Tensor& t);
  // Returns which library runs collectives of a tensor: "core", "engine" (the device engine) or the
  // native library's name.
  std::string path_of(const at::Tensor& t);

  // Returns the device engine for collectives in this rank's host memory if the group is mixed;
  // else null: then the core group runs them.
  DeviceEngine* host_engine(const Deadline& d);
  // Returns whether the device engine runs operations although all ranks use host memory: their
  // native libraries differ.
  bool is_engine_of_hosts();

  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }
  // Returns the device engine. Requires the lock. The first call creates it, and fails the group if
  // that throws.
  DeviceEngine& engine(const Deadline& d);
  // Returns the watchdog of operations on a device. Requires the lock and an earlier engine().
  StreamWatchdog& watchdog() { return *watchdog_; }
  // Returns the partition of the ranks by native library. Requires the lock.
  const RankPartition& native_clusters();
  // Returns the native library's backend for this rank's cluster. Requires the lock. Does not wait
  // for other ranks.
  NativePtr cluster_native(int cluster, int index, const std::vector<int>& ranks);
  // Throws Error(kAborted) after stop().
  void check_running() const;

  // Registers memory with the NVLink engine (registration.h); `name` identifies the memory pool.
  // All ranks call it with allocations of the same sizes, and then use tensors at the same offsets.
  void register_memory(const std::string& name, Regions regions);
  // To be called by all ranks before the memory is freed.
  void deregister_memory(const std::string& name);

  void set_timeout(Milliseconds timeout);
  // Blocks until all work enqueued on the current stream of this rank's device has ended.
  void synchronize_device();
  // Aborts operations that wait in a native library or a kernel. Any thread may call.
  void abort();
  // Waits up to kDeviceDrainTimeout for operations on devices, aborts the others, and releases all
  // resources.
  void stop();
  // For a forked child, where all resources belong to the parent: drops them without releasing
  // them.
  void leak();

  // Time in which a device should finish its operations when the group or the process ends.
  static constexpr Milliseconds kDeviceDrainTimeout{5000};

 private:
  template <class F>
  auto fail_group_on_error(const char* what, F&& body) -> decltype(body());
  NvlinkPath& nvlink_path_for(const char* what);
  std::vector<std::string> exchange(const std::string& text);
  c10::impl::VirtualGuardImpl device_guard() const;

  OperationQueue& queue_;
  Group& group_;
  const NativeLibrary native_;
  DeviceEngine::MakeNative make_native_;

  std::mutex mutex_;
  std::optional<GroupKind> kind_;
  std::optional<NativePtr> group_native_;  // null: not all ranks have the same native library
  std::optional<std::unique_ptr<NvlinkPath>> nvlink_;  // null: some rank cannot connect
  std::map<std::string, Regions> registered_;          // by name of the pool
  std::optional<RankPartition> clusters_;
  NativePtr cluster_native_;
  std::unique_ptr<DeviceEngine> engine_;
  std::unique_ptr<StreamWatchdog> watchdog_;
};

}  // namespace fsccl
