#include "kernel_plan.h"

#include <algorithm>

#include "../core/text.h"

namespace fsccl {
namespace nvlink {
namespace {

constexpr const char* kCollectiveNames[] = {"all_reduce", "reduce_scatter", "all_gather",
                                            "all_to_all", "broadcast"};
constexpr const char* kAlgorithmNames[] = {"other",    "flagged", "lines",
                                           "two_shot", "staged",  "direct"};
constexpr u64 kBytesPerBlock = 16 << 10;  // bytes for which another staged block is worth its flags

template <class T, size_t N>
bool find_name(const char* const (&names)[N], const std::string& name, T* out) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) {
      *out = static_cast<T>(i);
      return true;
    }
  }
  return false;
}

u64 ceil_div_u64(u64 a, u64 b) { return (a + b - 1) / b; }
u64 round_up(u64 n, u64 unit) { return ceil_div_u64(n, unit) * unit; }

const char* suffix(DType t) {
  switch (t) {
    case DType::kU8:
    case DType::kBool:
      return "u8";
    case DType::kI8:
      return "i8";
    case DType::kU16:
      return "u16";
    case DType::kI16:
      return "i16";
    case DType::kU32:
      return "u32";
    case DType::kI32:
      return "i32";
    case DType::kU64:
      return "u64";
    case DType::kI64:
      return "i64";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
    case DType::kOpaque:
      break;
  }
  return "";
}

bool is_reduction(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter;
}

std::string kernel_of(Collective c, Algorithm a, DType t, int ranks) {
  const char* const most = ranks <= 2 ? "_2" : ranks <= 4 ? "_4" : "_8";
  const std::string of = std::string("_") + suffix(t) + most;
  const bool all = c == Collective::kAllReduce;
  switch (a) {
    case Algorithm::kFlagged:
      // Boxes are safe because there are cells between every pair of ranks; a broadcast has none.
      if (c == Collective::kBroadcast) return "";
      return is_reduction(c) ? "reduce_flagged" + of : std::string("copy_flagged") + most;
    case Algorithm::kLines:
      if (c == Collective::kBroadcast) return "";
      return is_reduction(c) ? "reduce_lines" + of : std::string("copy_lines") + most;
    case Algorithm::kTwoShot:
      return all ? "all_reduce_lines" + of : "";
    case Algorithm::kStaged:
      if (!is_reduction(c)) return "copy_staged";
      return (all ? "all_reduce_staged" : "reduce_scatter_staged") + of;
    case Algorithm::kDirect:
      if (c == Collective::kBroadcast) return "";
      if (!is_reduction(c)) return "copy_direct";
      return (all ? "all_reduce_direct" : "reduce_scatter_direct") + of;
    case Algorithm::kOther:
      break;
  }
  return "";
}

// Number of cells that one source has in a box.
u32 cells_of_source(Algorithm a, int ranks) {
  const u32 n = static_cast<u32>(ranks);
  return a == Algorithm::kFlagged ? box_packets(n) : rack_bundles(n);
}

// Plans the grid of a kernel of cells: the most threads, up to those of the shape, with which all
// cells fit the boxes. A channel takes part only if it has a cell for every pair of ranks
// (cells.h).
KernelPlan plan_cells(std::string kernel, const KernelShape& shape, u64 bytes, int ranks,
                      u64 max_blocks, u64 warp) {
  const bool two_shot = shape.algorithm == Algorithm::kTwoShot;
  const bool packets = shape.algorithm == Algorithm::kFlagged;
  const u64 all = ceil_div_u64(bytes, packets ? sizeof(u64) : kBundleData);
  const u64 n = static_cast<u64>(ranks), least = two_shot ? all / n : all;
  const u64 most = two_shot ? ceil_div_u64(all, n) : all;
  const u64 room = cells_of_source(shape.algorithm, ranks) / (two_shot ? 2 : 1);
  const u64 cells_of_warp = packets ? warp : 1;
  if (least == 0) return {};
  const u64 allowed = (shape.threads > 0 ? shape.threads : kMaxThreads) / warp;
  for (u64 warps = std::min(allowed, ceil_div_u64(most, cells_of_warp)); warps > 0; --warps) {
    const u64 cells_at_once = warps * cells_of_warp;
    const u64 blocks = std::min({u64{shape.blocks > 0 ? shape.blocks : kChannels}, max_blocks,
                                 ceil_div_u64(least, cells_at_once)});
    if (ceil_div_u64(most, blocks * cells_at_once) * cells_at_once > room) continue;
    return {std::move(kernel), static_cast<u32>(blocks), static_cast<u32>(warps * warp)};
  }
  return {};
}

// Partitions `bytes`, which has so many shares, among channels and rounds into pieces of equal
// shares of at most `most` bytes: as few rounds as that allows, but at least four if shares stay
// large, because one piece is read while the next is written; then pieces as small as the rounds
// allow.
void set_even_partition(u64 shares, u64 most, u64 channels, KernelArgs* args) {
  constexpr u64 kMinRounds = 4, kLargeShare = 16 << 10, kVec = 2 * sizeof(u64);
  const u64 all = ceil_div_u64(args->bytes, shares * channels);  // of a share, per channel
  const u64 needed = ceil_div_u64(all, most / kVec * kVec);
  const u64 rounds =
      std::max({u64{1}, needed, all >= kMinRounds * kLargeShare ? kMinRounds : u64{0}});
  args->rounds = static_cast<u32>(rounds);
  args->piece = round_up(ceil_div_u64(args->bytes, rounds * channels), shares * kVec);
}

}  // namespace

const char* name_of(Collective c) { return kCollectiveNames[static_cast<int>(c)]; }
const char* name_of(Algorithm a) { return kAlgorithmNames[static_cast<int>(a)]; }

TuningTable TuningTable::parse(const std::string& text) {
  TuningTable table;
  for (const std::string& line : split(text, '\n')) {
    if (line.empty()) continue;
    std::vector<std::string> words = split(line, ' ');
    words.erase(std::remove(words.begin(), words.end(), ""), words.end());
    Entry row{};
    Collective c{};
    const bool registered = words.size() > 1 && words[1] == "registered";
    const bool valid = words.size() == 6 && find_name(kCollectiveNames, words[0], &c) &&
                       (registered || words[1] == "ordinary") && read_number(words[2], &row.most) &&
                       find_name(kAlgorithmNames, words[3], &row.shape.algorithm) &&
                       read_number(words[4], &row.shape.blocks) && row.shape.blocks <= kChannels &&
                       read_number(words[5], &row.shape.threads) &&
                       row.shape.threads <= kMaxThreads && row.shape.threads % 32 == 0 &&
                       (registered || row.shape.algorithm != Algorithm::kDirect);
    if (!valid) {
      fail_usage(
          "a table of NVLink kernels: expected '<collective> <ordinary|registered> <most "
          "bytes> <algorithm> <blocks, at most " +
          std::to_string(kChannels) + "> <threads, a multiple of 32>', found '" + line + "'");
    }
    auto& rows = table.rows(c, registered);
    if (!rows.empty() && rows.back().most >= row.most) {
      fail_usage("a table of NVLink kernels: sizes must ascend, found '" + line + "'");
    }
    rows.push_back(row);
  }
  return table;
}

// Measured on two and on four H200: docs/results/fsccl-nvlink-2xh200.json and -4xh200.json. The
// entries for more ranks are extrapolated from those and from a prototype; broadcast was not
// measured.
TuningTable TuningTable::default_table(int ranks) {
  if (ranks <= 2) {
    return parse(
        "all_reduce ordinary 131072 flagged 0 128\n"
        "all_reduce ordinary 524288 lines 0 512\n"
        "all_reduce ordinary 2097152 two_shot 0 512\n"
        "all_reduce ordinary 8388608 staged 64 256\n"
        "all_reduce ordinary 8388609 staged 64 512\n"
        "all_reduce registered 131072 flagged 0 128\n"
        "all_reduce registered 524288 lines 0 512\n"
        "all_reduce registered 2097152 two_shot 0 512\n"
        "all_reduce registered 8388608 direct 64 512\n"
        "all_reduce registered 8388609 direct 16 512\n"
        "reduce_scatter ordinary 131072 flagged 0 128\n"
        "reduce_scatter ordinary 2097152 lines 0 512\n"
        "reduce_scatter ordinary 2097153 staged 64 512\n"
        "reduce_scatter registered 131072 flagged 0 128\n"
        "reduce_scatter registered 2097152 lines 0 512\n"
        "reduce_scatter registered 8388608 staged 64 512\n"
        "reduce_scatter registered 8388609 direct 32 512\n"
        "all_gather ordinary 131072 flagged 0 128\n"
        "all_gather ordinary 2097152 lines 0 512\n"
        "all_gather ordinary 8388608 staged 64 256\n"
        "all_gather ordinary 8388609 staged 64 512\n"
        "all_gather registered 131072 flagged 0 128\n"
        "all_gather registered 2097152 lines 0 512\n"
        "all_gather registered 2097153 direct 64 512\n"
        "all_to_all ordinary 262144 flagged 0 128\n"
        "all_to_all ordinary 2097152 lines 0 512\n"
        "all_to_all ordinary 8388608 staged 64 256\n"
        "all_to_all ordinary 8388609 staged 64 512\n"
        "all_to_all registered 262144 flagged 0 128\n"
        "all_to_all registered 2097152 lines 0 512\n"
        "all_to_all registered 8388608 staged 64 256\n"
        "all_to_all registered 8388609 direct 64 512\n"
        "broadcast ordinary 1048576 staged 0 0\n"
        "broadcast ordinary 1048577 other 0 0\n");
  }
  if (ranks <= 4) {
    return parse(
        "all_reduce ordinary 32768 flagged 0 256\n"
        "all_reduce ordinary 131072 lines 0 256\n"
        "all_reduce ordinary 524288 two_shot 0 256\n"
        "all_reduce ordinary 1310720 two_shot 0 512\n"
        "all_reduce ordinary 33554432 staged 64 256\n"
        "all_reduce ordinary 33554433 other 0 0\n"
        "all_reduce registered 32768 flagged 0 256\n"
        "all_reduce registered 131072 lines 0 256\n"
        "all_reduce registered 524288 two_shot 0 256\n"
        "all_reduce registered 1310720 two_shot 0 512\n"
        "all_reduce registered 67108864 direct 64 512\n"
        "all_reduce registered 67108865 other 0 0\n"
        "reduce_scatter ordinary 262144 flagged 0 256\n"
        "reduce_scatter ordinary 2097152 lines 0 512\n"
        "reduce_scatter ordinary 2097153 staged 64 512\n"
        "reduce_scatter registered 262144 flagged 0 256\n"
        "reduce_scatter registered 2097152 lines 0 512\n"
        "reduce_scatter registered 8388608 staged 64 512\n"
        "reduce_scatter registered 8388609 direct 64 512\n"
        "all_gather ordinary 131072 flagged 0 128\n"
        "all_gather ordinary 524288 lines 0 256\n"
        "all_gather ordinary 2097152 lines 0 512\n"
        "all_gather ordinary 8388608 staged 64 256\n"
        "all_gather ordinary 8388609 staged 64 512\n"
        "all_gather registered 131072 flagged 0 128\n"
        "all_gather registered 524288 lines 0 256\n"
        "all_gather registered 2097152 lines 0 512\n"
        "all_gather registered 2097153 direct 64 512\n"
        "all_to_all ordinary 262144 flagged 0 128\n"
        "all_to_all ordinary 2097152 lines 0 512\n"
        "all_to_all ordinary 8388608 staged 64 256\n"
        "all_to_all ordinary 134217728 staged 64 512\n"
        "all_to_all ordinary 134217729 other 0 0\n"
        "all_to_all registered 262144 flagged 0 256\n"
        "all_to_all registered 2097152 lines 0 512\n"
        "all_to_all registered 2097153 direct 64 512\n"
        "broadcast ordinary 1048576 staged 0 0\n"
        "broadcast ordinary 1048577 other 0 0\n");
  }
  return parse(
      "all_reduce ordinary 16384 flagged 0 256\n"
      "all_reduce ordinary 65536 lines 0 256\n"
      "all_reduce ordinary 1179648 two_shot 0 512\n"
      "all_reduce ordinary 33554432 staged 64 512\n"
      "all_reduce ordinary 33554433 other 0 0\n"
      "all_reduce registered 16384 flagged 0 256\n"
      "all_reduce registered 65536 lines 0 256\n"
      "all_reduce registered 1179648 two_shot 0 512\n"
      "all_reduce registered 33554432 direct 64 512\n"
      "all_reduce registered 33554433 other 0 0\n"
      "reduce_scatter ordinary 131072 flagged 0 256\n"
      "reduce_scatter ordinary 2097152 lines 0 512\n"
      "reduce_scatter ordinary 67108864 staged 64 512\n"
      "reduce_scatter ordinary 67108865 other 0 0\n"
      "all_gather ordinary 131072 flagged 0 256\n"
      "all_gather ordinary 2097152 lines 0 512\n"
      "all_gather ordinary 67108864 staged 64 512\n"
      "all_gather ordinary 67108865 other 0 0\n"
      "all_to_all ordinary 131072 flagged 0 256\n"
      "all_to_all ordinary 2097152 lines 0 512\n"
      "all_to_all ordinary 67108864 staged 64 512\n"
      "all_to_all ordinary 67108865 other 0 0\n"
      "broadcast ordinary 1048576 staged 0 0\n"
      "broadcast ordinary 1048577 other 0 0\n");
}

KernelShape TuningTable::find(Collective c, bool registered, u64 bytes) const {
  const auto& rows = rows_[static_cast<size_t>(c) * 2 + (registered ? 1 : 0)];
  if (rows.empty()) return registered ? find(c, false, bytes) : KernelShape{};
  for (const Entry& row : rows) {
    if (bytes <= row.most) return row.shape;
  }
  return rows.back().shape;
}

std::string TuningTable::text() const {
  std::string out;
  for (size_t i = 0; i < kCollectives * 2; ++i) {
    for (const Entry& row : rows_[i]) {
      out += kCollectiveNames[i / 2];
      out += i % 2 == 0 ? " ordinary " : " registered ";
      out += std::to_string(row.most) + ' ' + name_of(row.shape.algorithm) + ' ' +
             std::to_string(row.shape.blocks) + ' ' + std::to_string(row.shape.threads) + '\n';
    }
  }
  return out;
}

KernelPlan plan_kernel(Collective c, const KernelShape& shape, DType dtype, u64 bytes, int ranks,
                       u32 most, u32 warp) {
  std::string kernel = kernel_of(c, shape.algorithm, dtype, ranks);
  if (kernel.empty() || bytes > kMaxPartBytes) return {};
  if (uses_cells(shape.algorithm)) {
    return plan_cells(std::move(kernel), shape, bytes, ranks, most, warp);
  }
  const bool whole = c == Collective::kAllReduce || c == Collective::kBroadcast;
  const u64 total = whole ? bytes : bytes * static_cast<u64>(ranks);
  const u64 useful = std::max<u64>(1, ceil_div_u64(total, kBytesPerBlock));
  const u64 blocks = std::min<u64>(most, shape.blocks > 0 ? shape.blocks : useful);
  return {std::move(kernel), static_cast<u32>(blocks),
          shape.threads > 0 ? shape.threads : kMaxThreads};
}

void set_partition(Collective c, Algorithm algorithm, u32 blocks, KernelArgs* args) {
  const u64 n = static_cast<u64>(args->ranks);
  const u64 vec = 2 * sizeof(u64);
  if (uses_cells(algorithm)) {
    args->cells = cells_of_source(algorithm, args->ranks);
  } else if (algorithm == Algorithm::kDirect) {
    // The part of a rank of all_reduce, and of a channel of the copying collectives.
    const u64 parts = c == Collective::kAllReduce ? n : blocks;
    args->piece = round_up(ceil_div_u64(args->bytes, parts), vec);
  } else if (c == Collective::kAllReduce) {
    const u64 half = args->slot_bytes / 2;  // one half for inputs, the other for results
    set_even_partition(n, half / (n - 1), blocks, args);
  } else {
    set_even_partition(1, args->slot_bytes / (c == Collective::kBroadcast ? 1 : n - 1), blocks,
                       args);
  }
}

std::string unit_of(const std::string& kernel) {
  const std::vector<std::string> words = split(kernel, '_');
  if (words[0] == "copy") return "movers";
  return words[words.size() - 2];  // the last word is the number of ranks
}

KernelArgs make_kernel_args(Collective c, const void* in, void* out, u64 bytes, int rank, int ranks,
                            int root) {
  KernelArgs a{};
  a.in = static_cast<const char*>(in);
  a.out = static_cast<char*>(out);
  a.bytes = bytes;
  a.rank = rank;
  a.ranks = ranks;
  a.root = c == Collective::kBroadcast ? root : -1;
  if (c == Collective::kReduceScatter || c == Collective::kAllToAll) a.stride_in = bytes;
  if (c == Collective::kAllGather || c == Collective::kAllToAll) a.stride_out = bytes;
  a.width_in = common_width({reinterpret_cast<uintptr_t>(in), a.stride_in});
  a.width_out = common_width({reinterpret_cast<uintptr_t>(out), a.stride_out});
  return a;
}

bool has_reduction_kernel(const Reduction& r) {
  const bool bits = r.op == RedOp::kBand || r.op == RedOp::kBor || r.op == RedOp::kBxor;
  switch (r.dtype) {
    case DType::kOpaque:
      return false;
    case DType::kBool:
      return r.op != RedOp::kAvg && r.op != RedOp::kPremulSum;
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
      return !bits;
    default:
      return true;
  }
}

Math math_of(const Reduction& r) {
  static_assert(static_cast<int>(RedOp::kPremulSum) == static_cast<int>(Math::kPremulSum) &&
                    static_cast<int>(RedOp::kMin) == static_cast<int>(Math::kMin),
                "the kernels know reductions by their numbers");
  if (r.dtype != DType::kBool) return static_cast<Math>(r.op);
  switch (r.op) {
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return Math::kBand;
    case RedOp::kBxor:
      return Math::kBxor;
    default:
      return Math::kBor;
  }
}

u32 common_width(std::initializer_list<u64> addresses) {
  u64 all = 16;
  for (const u64 a : addresses) all |= a;
  return static_cast<u32>(all & (~all + 1));
}

}  // namespace nvlink
}  // namespace fsccl
