// Python bindings of the NVLink engine: its installation, and calls without a torch process group,
// for tests and measurements. flagscale/comm/fsccl/nvlink.py is their only user.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine.h"

namespace py = pybind11;

namespace fsccl {
namespace nvlink {
namespace {

template <class T>
T parse_name(int count, const std::string& name, const char* kind) {
  for (int i = 0; i < count; ++i) {
    if (name == name_of(static_cast<T>(i))) return static_cast<T>(i);
  }
  fail_usage(std::string("there is no ") + kind + " '" + name + "'");
}

std::vector<std::string> strings(const std::vector<py::bytes>& list) {
  return {list.begin(), list.end()};
}

const void* pointer_of(uintptr_t address) { return reinterpret_cast<const void*>(address); }

bool run(Communicator& c, const std::string& collective, uintptr_t in, uintptr_t out, u64 bytes,
         const std::string& dtype, const std::string& op, double factor, int root, uintptr_t stream,
         const std::string& algorithm, u32 blocks, u32 threads) {
  Call call;
  call.collective = parse_name<Collective>(kCollectives, collective, "collective");
  call.in = pointer_of(in);
  call.out = const_cast<void*>(pointer_of(out));
  call.bytes = bytes;
  call.reduction.dtype = parse_name<DType>(static_cast<int>(DType::kOpaque), dtype, "element type");
  call.reduction.op = parse_name<RedOp>(static_cast<int>(RedOp::kPremulSum) + 1, op, "reduction");
  call.reduction.factor = factor;
  call.root = root;
  call.stream = reinterpret_cast<Stream>(stream);
  const py::gil_scoped_release released;
  if (algorithm.empty()) return c.run(call);
  const KernelShape forced_shape{parse_name<Algorithm>(kAlgorithms, algorithm, "algorithm"), blocks,
                                 threads};
  return c.run(call, &forced_shape);
}

std::unique_ptr<Communicator> make_communicator(int device, int rank, int size, u64 timeout_ms) {
  Engine* const engine = Engine::find(device);
  if (engine == nullptr) fail_usage("no NVLink engine is installed for this device");
  return std::make_unique<Communicator>(*engine, rank, size, timeout_ms * 1000000);
}

}  // namespace

void bind(py::module_& parent) {
  py::module_ m = parent.def_submodule("nvlink");
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_blocks") = kChannels;
  m.def(
      "install",
      [](int device, const std::map<std::string, py::bytes>& cubins,
         const std::map<int, std::string>& tables, u64 slot_bytes, u32 max_blocks) {
        Engine::Options options;
        for (const auto& [ranks, text] : tables) options.tables[ranks] = TuningTable::parse(text);
        if (slot_bytes > 0) options.slot_bytes = slot_bytes;
        if (max_blocks > 0) options.max_blocks = max_blocks;
        auto gpu = cuda_device(device, {cubins.begin(), cubins.end()});
        Engine::install(device, std::make_unique<Engine>(std::move(gpu), options));
      },
      py::arg("device"), py::arg("cubins"), py::arg("tables"), py::arg("slot_bytes"),
      py::arg("max_blocks"));
  m.def("set_installer", &Engine::set_installer, py::arg("install"));
  m.def("installed", [](int device) { return Engine::find(device) != nullptr; });
  m.def("check_table", [](const std::string& text) { return TuningTable::parse(text).text(); });
  m.def("default_table", [](int ranks) { return TuningTable::default_table(ranks).text(); });

  py::class_<Communicator>(m, "Communicator")
      .def(py::init(&make_communicator), py::arg("device"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_ms"))
      .def("peer_info", [](const Communicator& c) { return py::bytes(c.peer_info()); })
      .def("connect",
           [](Communicator& c, const std::vector<py::bytes>& texts) { c.connect(strings(texts)); })
      .def("memory_handle",
           [](const Communicator& c, uintptr_t at, u64 bytes) {
             return py::bytes(c.memory_handle(pointer_of(at), bytes));
           })
      .def("connect_memory",
           [](Communicator& c, uintptr_t at, u64 bytes, const std::vector<py::bytes>& handles) {
             c.connect_memory(pointer_of(at), bytes, strings(handles));
           })
      .def("run", &run, py::arg("collective"), py::arg("input"), py::arg("output"),
           py::arg("bytes"), py::arg("dtype"), py::arg("op"), py::arg("factor"), py::arg("root"),
           py::arg("stream"), py::arg("algorithm"), py::arg("blocks"), py::arg("threads"))
      .def("abort", &Communicator::abort)
      .def("failure", [](const Communicator& c) -> py::object {
        const auto error = c.failure();
        return error ? py::object(py::str(error->what())) : py::none();
      });
}

}  // namespace nvlink
}  // namespace fsccl
