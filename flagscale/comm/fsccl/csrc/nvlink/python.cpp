// The engine for Python: installing it, and calling it by itself to check and to measure it.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine.h"

namespace py = pybind11;

namespace fsccl {
namespace nvlink {
namespace {

template <class T>
T named(int count, const std::string& name, const char* what) {
  for (int i = 0; i < count; ++i) {
    if (name == name_of(static_cast<T>(i))) return static_cast<T>(i);
  }
  fail_usage(std::string("there is no ") + what + " '" + name + "'");
}

std::vector<std::string> strings(const std::vector<py::bytes>& list) {
  return {list.begin(), list.end()};
}

const void* memory(uintptr_t at) { return reinterpret_cast<const void*>(at); }

bool run(Communicator& c, const std::string& collective, uintptr_t in, uintptr_t out, u64 bytes,
         const std::string& dtype, const std::string& op, double factor, int root,
         uintptr_t stream, const std::string& algorithm, u32 blocks, u32 threads) {
  Call call;
  call.collective = named<Collective>(kCollectives, collective, "collective");
  call.in = memory(in);
  call.out = const_cast<void*>(memory(out));
  call.bytes = bytes;
  call.reduction.dtype = named<DType>(static_cast<int>(DType::kOpaque), dtype, "element type");
  call.reduction.op = named<RedOp>(static_cast<int>(RedOp::kPremulSum) + 1, op, "reduction");
  call.reduction.factor = factor;
  call.root = root;
  call.stream = reinterpret_cast<Stream>(stream);
  const py::gil_scoped_release released;
  if (algorithm.empty()) return c.run(call);
  const Shape forced{named<Algorithm>(kAlgorithms, algorithm, "algorithm"), blocks, threads};
  return c.run(call, &forced);
}

std::unique_ptr<Communicator> make(int device, int rank, int size, u64 timeout_ms) {
  Engine* const engine = Engine::installed(device);
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
         const std::map<int, std::string>& tables, u64 slot_bytes, u32 most_blocks) {
        Engine::Options options;
        for (const auto& [ranks, text] : tables) options.tables[ranks] = Table::parse(text);
        if (slot_bytes > 0) options.slot_bytes = slot_bytes;
        if (most_blocks > 0) options.most_blocks = most_blocks;
        auto gpu = cuda_device(device, {cubins.begin(), cubins.end()});
        Engine::install(device, std::make_unique<Engine>(std::move(gpu), options));
      },
      py::arg("device"), py::arg("cubins"), py::arg("tables"), py::arg("slot_bytes"),
      py::arg("most_blocks"));
  m.def("on_demand", &Engine::on_demand, py::arg("install"));
  m.def("installed", [](int device) { return Engine::installed(device) != nullptr; });
  m.def("check_table", [](const std::string& text) { return Table::parse(text).text(); });
  m.def("guess", [](int ranks) { return Table::guess(ranks).text(); });

  py::class_<Communicator>(m, "Communicator")
      .def(py::init(&make), py::arg("device"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_ms"))
      .def("card", [](const Communicator& c) { return py::bytes(c.card()); })
      .def("connect", [](Communicator& c,
                         const std::vector<py::bytes>& cards) { c.connect(strings(cards)); })
      .def("memory_card", [](const Communicator& c, uintptr_t at,
                             u64 bytes) { return py::bytes(c.memory_card(memory(at), bytes)); })
      .def("connect_memory",
           [](Communicator& c, uintptr_t at, u64 bytes, const std::vector<py::bytes>& cards) {
             c.connect_memory(memory(at), bytes, strings(cards));
           })
      .def("run", &run, py::arg("collective"), py::arg("input"), py::arg("output"),
           py::arg("bytes"), py::arg("dtype"), py::arg("op"), py::arg("factor"), py::arg("root"),
           py::arg("stream"), py::arg("algorithm"), py::arg("blocks"), py::arg("threads"))
      .def("abort", &Communicator::abort)
      .def("failure", [](const Communicator& c) -> py::object {
        const auto why = c.failure();
        return why ? py::object(py::str(why->what())) : py::none();
      });
}

}  // namespace nvlink
}  // namespace fsccl
