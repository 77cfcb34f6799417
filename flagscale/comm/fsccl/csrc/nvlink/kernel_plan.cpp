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
constexpr u64 kBytesPerBlock = 16 << 10;  // message bytes per block from which another one pays off

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

const char* element_suffix(DType t) {
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
    case DType::kComplex32:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kF8E5M2:
    case DType::kF8E4M3:
      break;
  }
  return "";
}

bool is_reduction(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter;
}

std::string kernel_name(Collective c, Algorithm a, DType t, int ranks) {
  const char* const capacity = ranks <= 2 ? "_2" : ranks <= 4 ? "_4" : "_8";
  const std::string element_and_capacity = std::string("_") + element_suffix(t) + capacity;
  const bool is_all_reduce = c == Collective::kAllReduce;
  switch (a) {
    case Algorithm::kFlagged:
      // Cell buffers can be reused because every pair of ranks exchanges cells (cells.h), which is
      // not so in a broadcast.
      if (c == Collective::kBroadcast) return "";
      return is_reduction(c) ? "reduce_flagged" + element_and_capacity
                             : std::string("copy_flagged") + capacity;
    case Algorithm::kLines:
      if (c == Collective::kBroadcast) return "";
      return is_reduction(c) ? "reduce_lines" + element_and_capacity
                             : std::string("copy_lines") + capacity;
    case Algorithm::kTwoShot:
      return is_all_reduce ? "all_reduce_lines" + element_and_capacity : "";
    case Algorithm::kStaged:
      if (!is_reduction(c)) return "copy_staged";
      return (is_all_reduce ? "all_reduce_staged" : "reduce_scatter_staged") + element_and_capacity;
    case Algorithm::kDirect:
      if (c == Collective::kBroadcast) return "";
      if (!is_reduction(c)) return "copy_direct";
      return (is_all_reduce ? "all_reduce_direct" : "reduce_scatter_direct") + element_and_capacity;
    case Algorithm::kOther:
      break;
  }
  return "";
}

// Number of cells for which one source has room in a buffer (cells.h).
u32 cells_of_source(Algorithm a, int ranks) {
  const u32 rank_count = static_cast<u32>(ranks);
  return a == Algorithm::kFlagged ? packets_per_source(rank_count) : bundles_per_source(rank_count);
}

// Plans the grid of a kernel that sends cells: as many threads as fit, up to those of the shape,
// such that all cells fit the buffers. A channel takes part only if it has a cell for every pair of
// ranks (cells.h). Returns an empty plan if the message does not fit.
KernelPlan plan_cells(std::string kernel, const KernelShape& shape, u64 bytes, int ranks,
                      u64 max_blocks, u64 warp) {
  const bool is_two_shot = shape.algorithm == Algorithm::kTwoShot;
  const bool uses_packets = shape.algorithm == Algorithm::kFlagged;
  const u64 total_cells = ceil_div_u64(bytes, uses_packets ? sizeof(u64) : kBundleDataBytes);
  // Cells that a rank sends to a peer: all, or its share.
  const u64 rank_count = static_cast<u64>(ranks);
  const u64 min_cells_of_rank = is_two_shot ? total_cells / rank_count : total_cells;
  const u64 max_cells_of_rank = is_two_shot ? ceil_div_u64(total_cells, rank_count) : total_cells;
  const u64 max_cells_per_source = cells_of_source(shape.algorithm, ranks) / (is_two_shot ? 2 : 1);
  const u64 cells_of_warp = uses_packets ? warp : 1;
  if (min_cells_of_rank == 0) return {};
  const u64 max_warps = (shape.threads > 0 ? shape.threads : kMaxThreads) / warp;
  for (u64 warps = std::min(max_warps, ceil_div_u64(max_cells_of_rank, cells_of_warp)); warps > 0;
       --warps) {
    const u64 cells_at_once = warps * cells_of_warp;
    const u64 blocks = std::min({u64{shape.blocks > 0 ? shape.blocks : kChannels}, max_blocks,
                                 ceil_div_u64(min_cells_of_rank, cells_at_once)});
    if (ceil_div_u64(max_cells_of_rank, blocks * cells_at_once) * cells_at_once >
        max_cells_per_source)
      continue;
    return {std::move(kernel), static_cast<u32>(blocks), static_cast<u32>(warps * warp)};
  }
  return {};
}

// Partitions the message among channels and rounds: a piece is what one channel sends in one round,
// and consists of `shares` equal shares of at most `max_share_bytes`. Takes as few rounds as that
// allows, but at least four if shares stay large, because one piece is read while the next is
// written; then makes the pieces as small as that number of rounds allows.
void set_even_partition(u64 shares, u64 max_share_bytes, u64 channels, KernelArgs* args) {
  constexpr u64 kMinRounds = 4, kLargeShare = 16 << 10, kVec = 2 * sizeof(u64);
  const u64 share_bytes = ceil_div_u64(args->bytes, shares * channels);  // per channel, all rounds
  const u64 needed_rounds = ceil_div_u64(share_bytes, max_share_bytes / kVec * kVec);
  const u64 rounds = std::max(
      {u64{1}, needed_rounds, share_bytes >= kMinRounds * kLargeShare ? kMinRounds : u64{0}});
  args->rounds = static_cast<u32>(rounds);
  args->piece_bytes = round_up(ceil_div_u64(args->bytes, rounds * channels), shares * kVec);
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
    const bool valid =
        words.size() == 6 && find_name(kCollectiveNames, words[0], &c) &&
        (registered || words[1] == "ordinary") && parse_decimal(words[2], &row.max_bytes) &&
        find_name(kAlgorithmNames, words[3], &row.shape.algorithm) &&
        parse_decimal(words[4], &row.shape.blocks) && row.shape.blocks <= kChannels &&
        parse_decimal(words[5], &row.shape.threads) && row.shape.threads <= kMaxThreads &&
        row.shape.threads % 32 == 0 && (registered || row.shape.algorithm != Algorithm::kDirect);
    if (!valid) {
      fail_usage(
          "a table of NVLink kernels: expected '<collective> <ordinary|registered> <most "
          "bytes> <algorithm> <blocks, at most " +
          std::to_string(kChannels) + "> <threads, a multiple of 32>', found '" + line + "'");
    }
    auto& rows = table.rows(c, registered);
    if (!rows.empty() && rows.back().max_bytes >= row.max_bytes) {
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

KernelShape TuningTable::choose_shape(Collective c, bool registered, u64 bytes) const {
  const auto& rows = rows_[static_cast<size_t>(c) * 2 + (registered ? 1 : 0)];
  if (rows.empty()) return registered ? choose_shape(c, false, bytes) : KernelShape{};
  for (const Entry& row : rows) {
    if (bytes <= row.max_bytes) return row.shape;
  }
  return rows.back().shape;
}

std::string TuningTable::text() const {
  std::string out;
  for (size_t i = 0; i < kCollectives * 2; ++i) {
    for (const Entry& row : rows_[i]) {
      out += kCollectiveNames[i / 2];
      out += i % 2 == 0 ? " ordinary " : " registered ";
      out += std::to_string(row.max_bytes) + ' ' + name_of(row.shape.algorithm) + ' ' +
             std::to_string(row.shape.blocks) + ' ' + std::to_string(row.shape.threads) + '\n';
    }
  }
  return out;
}

KernelPlan plan_kernel(Collective c, const KernelShape& shape, DType dtype, u64 bytes, int ranks,
                       u32 max_blocks, u32 warp) {
  std::string kernel = kernel_name(c, shape.algorithm, dtype, ranks);
  if (kernel.empty() || bytes > kMaxPartBytes) return {};
  if (uses_cells(shape.algorithm)) {
    return plan_cells(std::move(kernel), shape, bytes, ranks, max_blocks, warp);
  }
  const bool has_one_part = c == Collective::kAllReduce || c == Collective::kBroadcast;
  const u64 total = has_one_part ? bytes : bytes * static_cast<u64>(ranks);
  const u64 useful_blocks = std::max<u64>(1, ceil_div_u64(total, kBytesPerBlock));
  const u64 blocks = std::min<u64>(max_blocks, shape.blocks > 0 ? shape.blocks : useful_blocks);
  return {std::move(kernel), static_cast<u32>(blocks),
          shape.threads > 0 ? shape.threads : kMaxThreads};
}

void set_partition(Collective c, Algorithm algorithm, u32 blocks, KernelArgs* args) {
  const u64 ranks = static_cast<u64>(args->ranks);
  const u64 vector_bytes = 2 * sizeof(u64);
  if (uses_cells(algorithm)) {
    args->cells_per_source = cells_of_source(algorithm, args->ranks);
  } else if (algorithm == Algorithm::kDirect) {
    // A piece belongs to a rank in all_reduce, and to a channel in the copying collectives.
    const u64 parts = c == Collective::kAllReduce ? ranks : blocks;
    args->piece_bytes = round_up(ceil_div_u64(args->bytes, parts), vector_bytes);
  } else if (c == Collective::kAllReduce) {
    const u64 half = args->slot_bytes / 2;  // one half for inputs, the other for results
    set_even_partition(ranks, half / (ranks - 1), blocks, args);
  } else {
    set_even_partition(1, args->slot_bytes / (c == Collective::kBroadcast ? 1 : ranks - 1), blocks,
                       args);
  }
}

std::string unit_of(const std::string& kernel) {
  const std::vector<std::string> words = split(kernel, '_');
  if (words[0] == "copy") return "copy";
  return words[words.size() - 2];  // the last word is the capacity in ranks
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
  const bool is_bitwise = r.op == RedOp::kBand || r.op == RedOp::kBor || r.op == RedOp::kBxor;
  switch (r.dtype) {
    case DType::kOpaque:
    case DType::kComplex32:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kF8E5M2:
    case DType::kF8E4M3:
      return false;
    case DType::kBool:
      return r.op != RedOp::kAvg && r.op != RedOp::kPremulSum;
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
      return !is_bitwise;
    default:
      return true;
  }
}

KernelOp kernel_op_of(const Reduction& r) {
  static_assert(static_cast<int>(RedOp::kPremulSum) == static_cast<int>(KernelOp::kPremulSum) &&
                    static_cast<int>(RedOp::kMin) == static_cast<int>(KernelOp::kMin),
                "the kernels know reductions by their numbers");
  if (r.dtype != DType::kBool) return static_cast<KernelOp>(r.op);
  switch (r.op) {
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return KernelOp::kBand;
    case RedOp::kBxor:
      return KernelOp::kBxor;
    default:
      return KernelOp::kBor;
  }
}

u32 common_width(std::initializer_list<u64> addresses) {
  u64 combined_bits = 16;
  for (const u64 address : addresses) combined_bits |= address;
  return static_cast<u32>(combined_bits & (~combined_bits + 1));
}

}  // namespace nvlink
}  // namespace fsccl
