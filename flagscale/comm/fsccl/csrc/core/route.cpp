#include "route.h"

#include <algorithm>
#include <array>
#include <utility>

#include "types.h"

namespace fsccl {
namespace {

constexpr std::array<const char*, 4> kAlgorithmNames{"auto", "ring", "tree", "transpose"};
// Between a message's sending and its being waited for: two chunks cross at a time.
constexpr size_t kCrossing = 2;

size_t time_of(size_t crossings) { return crossings * kCrossing; }

std::vector<int> in_order(std::vector<int> clusters) {
  std::sort(clusters.begin(), clusters.end());
  return clusters;
}

// A tree whose nodes are clusters, `place` of which says where in the tree a cluster is.
struct Tree {
  std::vector<TreeNode> nodes;
  std::vector<int> clusters;  // by node
  size_t height = 0;

  template <class F>
  Tree(int count, F place) : nodes(binary_tree(count)), clusters(nodes.size()) {
    for (int c = 0; c < count; ++c) clusters[static_cast<size_t>(place(c))] = c;
    for (const TreeNode& node : nodes) height = std::max(height, node.depth);
  }
  // The tree in which a cluster is the root.
  static Tree with_root(int count, int root) {
    int top = 0;
    const std::vector<TreeNode> shape = binary_tree(count);
    while (shape[static_cast<size_t>(top)].parent >= 0) ++top;
    return Tree(count, [=](int c) { return (c - root + top + count) % count; });
  }
  const TreeNode& node_of(int cluster) const { return nodes[place_of(cluster)]; }
  size_t place_of(int cluster) const {
    return static_cast<size_t>(std::find(clusters.begin(), clusters.end(), cluster) -
                               clusters.begin());
  }
  std::vector<int> parent(int cluster) const {
    const int node = node_of(cluster).parent;
    return node < 0 ? std::vector<int>() : std::vector<int>{clusters[static_cast<size_t>(node)]};
  }
  std::vector<int> children(int cluster) const {
    std::vector<int> out;
    for (const int node : node_of(cluster).children) {
      out.push_back(clusters[static_cast<size_t>(node)]);
    }
    return out;
  }
  // Its data added to its children's, on the way up.
  Hop up(int cluster, size_t segment) const {
    return {time_of(height - node_of(cluster).depth), segment,        true, false,
            in_order(children(cluster)),              parent(cluster)};
  }
  Hop down(int cluster, size_t segment, size_t levels_before) const {
    return {time_of(levels_before + node_of(cluster).depth), segment,          false, true,
            parent(cluster),                                 children(cluster)};
  }
};

// All others, the next one first: not everyone sends to the same cluster at once.
std::vector<int> others_of(int count, int me) {
  std::vector<int> out;
  for (int d = 1; d < count; ++d) out.push_back((me + d) % count);
  return out;
}

void sort_by_time(Route* route) {
  std::stable_sort(route->hops.begin(), route->hops.end(),
                   [](const Hop& a, const Hop& b) { return a.at < b.at; });
}

size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = corner + (a[i - 1] == b[j - 1] ? 0 : 1);
      corner = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

const char* name_of(Algorithm a) { return kAlgorithmNames[static_cast<size_t>(a)]; }

Algorithm algorithm_of(const std::string& name, const std::string& where) {
  std::string nearest = kAlgorithmNames[0];
  for (size_t i = 0; i < kAlgorithmNames.size(); ++i) {
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
    if (edits_between(name, kAlgorithmNames[i]) < edits_between(name, nearest)) {
      nearest = kAlgorithmNames[i];
    }
  }
  fail_usage(where + "=" + name + ": expected auto, ring, tree or transpose; did you mean " +
             nearest + "?");
}

Route exchange_route(int count, int me) {
  const std::vector<int> others = others_of(count, me);
  Route out;
  out.end = time_of(1);
  out.hops = {{0, 0, true, false, {}, others}, {time_of(1), 0, true, true, in_order(others), {}}};
  return out;
}

Route transpose_route(int count, int me) {
  const std::vector<int> others = others_of(count, me);
  Route out;
  out.segments = static_cast<size_t>(count);
  out.end = time_of(2);
  for (const int c : others) {
    const auto segment = static_cast<size_t>(c);
    out.hops.push_back({0, segment, true, false, {}, {c}});
    out.hops.push_back({time_of(2), segment, false, true, {c}, {}});
  }
  const auto own = static_cast<size_t>(me);
  out.hops.push_back({time_of(1), own, true, true, in_order(others), others});
  sort_by_time(&out);
  return out;
}

Route ring_route(int count, int me) {
  const int last = 2 * count - 2, before = (me + count - 1) % count, next = (me + 1) % count;
  Route out;
  out.segments = static_cast<size_t>(count);
  out.end = static_cast<size_t>(last);
  // As many steps as the sums take: while those of a chunk go around, so do results of the one
  // before.
  out.stride = static_cast<size_t>(count);
  for (int t = 0; t <= last; ++t) {
    const int segment = (me + 2 * count - 1 - t) % count;
    const bool adds = t < count;
    Hop hop{static_cast<size_t>(t), static_cast<size_t>(segment), adds, t + 1 >= count, {}, {}};
    if (t > 0) hop.from = {before};
    if (t < last) hop.to = {next};
    out.hops.push_back(hop);
  }
  return out;
}

Route tree_route(int count, int me) {
  // With the places of an even number turned round, or those of an odd one moved on by one, leaves
  // are inside.
  const Tree trees[] = {Tree(count, [](int c) { return c; }), Tree(count, [count](int c) {
                          return count % 2 == 0 ? count - 1 - c : (c + 1) % count;
                        })};
  Route out;
  out.segments = 2;
  for (size_t s = 0; s < out.segments; ++s) {
    Hop up = trees[s].up(me, s);
    Hop down = trees[s].down(me, s, trees[s].height);
    out.end = std::max(out.end, time_of(2 * trees[s].height));
    if (down.from.empty()) {  // the root: the result is there
      up.ends = true;
      up.to = down.to;
    } else {
      out.hops.push_back(down);
    }
    out.hops.push_back(up);
  }
  sort_by_time(&out);
  return out;
}

Route reduce_route(int count, int me, int root) {
  const Tree tree = Tree::with_root(count, root);
  Route out;
  out.end = time_of(tree.height);
  out.hops = {tree.up(me, 0)};
  out.hops[0].ends = me == root;
  return out;
}

Route broadcast_route(int count, int me, int root) {
  const Tree tree = Tree::with_root(count, root);
  Route out;
  out.end = time_of(tree.height);
  out.hops = {tree.down(me, 0, 0)};
  return out;
}

// Of places 1, 2, 3, ... the one that most powers of two divide is above those on both its sides.
std::vector<TreeNode> binary_tree(int count) {
  std::vector<TreeNode> nodes(static_cast<size_t>(count));
  const auto grow = [&nodes](const auto& self, int lo, int hi, int parent, size_t depth) -> void {
    if (lo >= hi) return;
    int top = lo;
    for (int i = lo; i < hi; ++i) {
      if (((i + 1) & -(i + 1)) > ((top + 1) & -(top + 1))) top = i;
    }
    nodes[static_cast<size_t>(top)] = {parent, {}, depth};
    if (parent >= 0) nodes[static_cast<size_t>(parent)].children.push_back(top);
    self(self, lo, top, top, depth + 1);
    self(self, top + 1, hi, top, depth + 1);
  };
  grow(grow, 0, count, -1, 0);
  return nodes;
}

}  // namespace fsccl
