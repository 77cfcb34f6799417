// Choice of the library that carries out an operation. Owns the resources it chooses between: the
// native library's backends, the device engine and the NVLink engine's connection.
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
// - every rank on its CPU: the core group;
// - every rank on a device: the core group for tensors of the host; for those of the device the
//   NVLink engine or the native library where that joins all ranks, else the device engine;
// - ranks of both kinds: the device engine for all tensors, which are moved to the rank's device
//   first.
//
// Libraries and connections are made by the first operation that needs them, to which all ranks
// come.
//
// The lock guards the making of libraries and the device engine's use by calls on devices. Methods
// state where the caller must hold it.
class Router {
 public:
  enum class GroupKind { kHost, kDevice, kMixed };

  // `make_native` makes the native library's backend for one of the group's native clusters.
  Router(OperationQueue& queue, NativeLibrary native, DeviceEngine::MakeNative make_native);

  // Returns whether this rank's collectives are of host memory.
  bool on_host() const;
  // Waits until all ranks are known.
  GroupKind group_kind();
  // Returns the device on which a tensor's operation is done. Throws if nothing here moves the
  // tensor.
  Placement placement_of(const at::Tensor& t, const char* op);
  // The native library's backend over all ranks, if it does this tensor's operations; else null.
  NativePtr group_native(const at::Tensor& t);
  const std::string& native_library() const { return native_.library; }
  // The NVLink engine's connection, where the native library joins all ranks and all of their GPUs
  // reach each other; else null. The first call with a tensor of a GPU connects.
  NvlinkPath* nvlink_path(const at::Tensor& t);
  // Returns how a tensor's collectives are done: "core", "engine" or the native library's name.
  std::string path_of(const at::Tensor& t);

  // Returns the device engine of this rank's host memory, in mixed groups; else null: the core
  // group does its collectives. Only for ranks of the host; one on a device moves its tensors
  // there.
  DeviceEngine* host_engine(const Deadline& d);
  // Returns whether a device engine does operations and all of its ranks are on their hosts.
  bool is_engine_of_hosts();

  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }
  // With the lock. Made by the first call; it fails the group if that throws.
  DeviceEngine& engine(const Deadline& d);
  // With the lock. Of a device's operations; after engine().
  StreamWatchdog& watchdog() { return *watchdog_; }
  // With the lock. Ranks that a native library joins, as all have published.
  const RankPartition& native_clusters();
  // With the lock. The native library inside this rank's cluster. Does not wait for other ranks.
  NativePtr cluster_native(int cluster, int index, const std::vector<int>& ranks);
  // Throws Error(kAborted) after stop().
  void check_running() const;

  // Lets peers read and write this memory directly (nvlink/engine.h). All ranks call it, with
  // memory that they have allocated in the same sizes, and later with tensors at the same places in
  // it.
  void register_memory(const std::string& name, Regions regions);
  // Before it is freed.
  void deregister_memory(const std::string& name);

  void set_timeout(Milliseconds timeout);
  // Blocks until the current stream of this rank's device has done what was enqueued before.
  void synchronize_device();
  // Ends what waits in a native library or a kernel. Any thread.
  void abort();
  // Waits for devices for a while, aborts what still waits then, and lets everything go.
  void stop();
  // In a forked child, where all of it belongs to the parent: forgets it without touching it.
  void leak();

  // Time that a device has to finish its operations when the group or the process ends.
  static constexpr Milliseconds kDeviceDrain{5000};

 private:
  template <class F>
  auto or_fail(const char* what, F&& body) -> decltype(body());
  NvlinkPath& nvlink_path_for(const char* what);
  std::vector<std::string> exchange(const std::string& text);
  c10::impl::VirtualGuardImpl device_guard() const;

  OperationQueue& queue_;
  Group& group_;
  const NativeLibrary native_;
  DeviceEngine::MakeNative make_native_;

  std::mutex mutex_;
  std::optional<GroupKind> kind_;
  std::optional<NativePtr> group_native_;  // null: the native library joins only some ranks
  std::optional<std::unique_ptr<NvlinkPath>> nvlink_;  // null: some rank cannot
  std::map<std::string, Regions> registered_;          // by pool
  std::optional<RankPartition> clusters_;
  NativePtr cluster_native_;
  std::unique_ptr<DeviceEngine> engine_;
  std::unique_ptr<StreamWatchdog> watchdog_;
};

}  // namespace fsccl
