// Python bindings of the backend: the extension module `_fsccl`, which
// flagscale/comm/fsccl/build.py compiles and loads.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "store.h"

namespace py = pybind11;
using fsccl::TorchBackend;

namespace fsccl::nvlink {
void bind(py::module_& parent);
}

namespace {

// Returns the segments of a torch.cuda.MemPool as regions for registration.h. A region's layout is
// the sizes of the segment's blocks.
fsccl::Regions segments_of(const py::object& pool) {
  fsccl::Regions regions;
  for (const py::handle& segment : pool.attr("snapshot")()) {
    fsccl::Region region{"", reinterpret_cast<const void*>(segment["address"].cast<uintptr_t>()),
                         segment["total_size"].cast<size_t>()};
    for (const py::handle& block : segment["blocks"]) {
      region.layout +=
          (region.layout.empty() ? "" : "+") + std::to_string(block["size"].cast<size_t>());
    }
    regions.push_back(std::move(region));
  }
  return regions;
}

c10::intrusive_ptr<TorchBackend::Options> make_options(const TorchBackend::Options* user_options,
                                                       std::vector<uint64_t> global_ranks) {
  auto options = user_options != nullptr
                     ? c10::make_intrusive<TorchBackend::Options>(*user_options)
                     : c10::make_intrusive<TorchBackend::Options>();
  options->global_ranks_in_group = std::move(global_ranks);
  return options;
}

py::list sizes_of(const fsccl::FlightRecorder::Tensors& tensors) {
  py::list out;
  for (const auto& sizes : tensors.sizes)
    out.append(py::cast(sizes));
  return out;
}

py::list dtypes_of(const fsccl::FlightRecorder::Tensors& tensors) {
  py::list out;
  for (const at::ScalarType dtype : tensors.dtypes) out.append(c10::toString(dtype));
  return out;
}

// Returns the entries of the flight recorder as dictionaries, see FlightRecorder::Entry.
py::list flight_entries() {
  std::vector<fsccl::FlightRecorder::Entry> entries;
  {
    const py::gil_scoped_release gil_release;
    entries = fsccl::FlightRecorder::of_this_process().entries();
  }
  py::list out;
  for (const auto& entry : entries) {
    py::dict row;
    row["id"] = entry.id;
    row["group"] = entry.group->name;
    row["rank"] = entry.group->rank;
    row["global_ranks"] = entry.group->global_ranks;
    row["title"] = entry.title;
    row["is_message"] = entry.is_message;
    row["peer"] = entry.peer;
    row["sequence"] = entry.sequence;
    row["input_sizes"] = sizes_of(entry.inputs);
    row["input_dtypes"] = dtypes_of(entry.inputs);
    row["output_sizes"] = sizes_of(entry.outputs);
    row["output_dtypes"] = dtypes_of(entry.outputs);
    row["timeout_ms"] = entry.timeout_ms;
    row["called_at"] = entry.called_at;
    row["began_at"] = entry.began_at;
    row["ended_at"] = entry.ended_at;
    row["failed"] = entry.failed;
    out.append(std::move(row));
  }
  return out;
}

std::string name_of(const py::object& pool) { return py::str(pool.attr("id")); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");  // defines the base classes
  m.def("shutdown_all", &TorchBackend::shutdown_all);
  fsccl::nvlink::bind(m);
  m.attr("protocol_version") = fsccl::kProtocolVersion;
  m.def("flight_entries", &flight_entries);
  m.def("agree_on_generation", &fsccl::agree_on_generation_of_ranks, py::arg("store"),
        py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("global_ranks"),
        py::call_guard<py::gil_scoped_release>());

  using Options = TorchBackend::Options;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def(py::init([](std::chrono::milliseconds timeout, std::optional<int> pipeline_k,
                       std::optional<int64_t> pipeline_nelem, std::optional<std::string> algorithm,
                       std::optional<std::string> tail) {
             auto options = c10::make_intrusive<Options>(timeout);
             options->algorithm = std::move(algorithm);
             options->pipeline_k = pipeline_k;
             options->pipeline_nelem = pipeline_nelem;
             options->tail = std::move(tail);
             return options;
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("pipeline_k") = std::nullopt,
           py::arg("pipeline_nelem") = std::nullopt, py::arg("algorithm") = std::nullopt,
           py::arg("tail") = std::nullopt)
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("pipeline_k", &Options::pipeline_k)
      .def_readwrite("pipeline_nelem", &Options::pipeline_nelem)
      .def_readwrite("tail", &Options::tail)
      .def("__copy__", [](const Options& o) { return Options(o); })
      .def("__deepcopy__", [](const Options& o, const py::dict&) { return Options(o); });

  py::class_<TorchBackend, c10d::Backend, c10::intrusive_ptr<TorchBackend>>(m, "Backend")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, std::string generation, int rank,
                       int size, std::chrono::milliseconds timeout, const std::string& name,
                       std::vector<uint64_t> global_ranks, const Options* user_options,
                       const std::vector<std::string>& native,
                       fsccl::DeviceEngine::MakeNative make_native) {
             TORCH_CHECK_VALUE(native.size() == 4, "native: device, vendor, library, reach");
             auto options = make_options(user_options, std::move(global_ranks));
             options->timeout = timeout;
             options->group_name = name;
             options->generation = std::move(generation);
             return c10::make_intrusive<TorchBackend>(
                 std::move(store), rank, size, std::move(options),
                 fsccl::NativeLibrary{native[0], native[1], native[2], native[3]},
                 std::move(make_native));
           }),
           py::arg("store"), py::arg("generation"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"), py::arg("name"), py::arg("global_ranks"), py::arg("options"), py::arg("native"), py::arg("make_native"),
           py::call_guard<py::gil_scoped_release>())
      .def_static(
          "check_settings",
          [](int rank, int size, std::vector<uint64_t> global_ranks, const Options* user_options) {
            TorchBackend::check_settings(rank, size,
                                         *make_options(user_options, std::move(global_ranks)));
          },
          py::arg("rank"), py::arg("size"), py::arg("global_ranks"), py::arg("options"))
      .def_property_readonly("options", [](TorchBackend& b) { return b.getBackendOptions(); })
      .def_property_readonly("generation", &TorchBackend::generation)
      .def("last_algorithm", &TorchBackend::last_algorithm,
           py::call_guard<py::gil_scoped_release>())
      .def("traffic", &TorchBackend::traffic, py::call_guard<py::gil_scoped_release>())
      .def("datagrams", &TorchBackend::datagrams, py::call_guard<py::gil_scoped_release>())
      .def("tail_statistics", &TorchBackend::tail_statistics,
           py::call_guard<py::gil_scoped_release>())
      .def(
          "register_mem_pool",
          [](TorchBackend& b, const py::object& pool, bool symm) {
            TORCH_CHECK_NOT_IMPLEMENTED(
                symm,
                "fsccl: register_mem_pool: all ranks must have made the same allocations in the "
                "pool; pass symm=True to confirm that");
            auto memory = segments_of(pool);
            const std::string name = name_of(pool);
            const py::gil_scoped_release gil_release;
            b.register_memory(name, std::move(memory));
          },
          py::arg("pool"), py::arg("symm") = false)
      .def(
          "deregister_mem_pool",
          [](TorchBackend& b, const py::object& pool) {
            const std::string name = name_of(pool);
            const py::gil_scoped_release gil_release;
            b.deregister_memory(name);
          },
          py::arg("pool"))
      // None: torch.cuda.MemPool then uses ordinary memory.
      .def_property_readonly("mem_allocator", [](TorchBackend&) { return py::none(); })
      .def("path_of", &TorchBackend::path_of, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout",
           [](TorchBackend& b, std::chrono::milliseconds timeout) { b.setTimeout(timeout); });
}
