#include "route.h"

#include <algorithm>
#include <array>
#include <utility>

#include "types.h"

namespace fsccl {
namespace {

constexpr std::array<const char*, 4> kAlgorithmNames{"auto", "ring", "tree", "transpose"};
// Logical time between sending a message and waiting for it. With two units, messages of two chunks
// are in flight at the same time.
constexpr size_t kTimePerCrossing = 2;

size_t time_of(size_t crossings) { return crossings * kTimePerCrossing; }

std::vector<int> sorted(std::vector<int> nodes) {
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

// A tree of nodes. vertex_of_node(node) returns the vertex of a node.
struct Tree {
  std::vector<TreeVertex> vertices;
  std::vector<int> nodes;  // by vertex
  size_t height = 0;

  template <class F>
  Tree(int count, F vertex_of_node) : vertices(binary_tree(count)), nodes(vertices.size()) {
    for (int c = 0; c < count; ++c) nodes[static_cast<size_t>(vertex_of_node(c))] = c;
    for (const TreeVertex& vertex : vertices) height = std::max(height, vertex.depth);
  }
  // Returns the tree in which a node is the root.
  static Tree with_root(int count, int root) {
    int root_vertex = 0;
    const std::vector<TreeVertex> vertices = binary_tree(count);
    while (vertices[static_cast<size_t>(root_vertex)].parent >= 0) ++root_vertex;
    return Tree(count, [=](int c) { return (c - root + root_vertex + count) % count; });
  }
  const TreeVertex& vertex_of(int node) const { return vertices[index_of(node)]; }
  size_t index_of(int node) const {
    return static_cast<size_t>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
  }
  std::vector<int> parent(int node) const {
    const int index = vertex_of(node).parent;
    return index < 0 ? std::vector<int>() : std::vector<int>{nodes[static_cast<size_t>(index)]};
  }
  std::vector<int> children(int node) const {
    std::vector<int> out;
    for (const int index : vertex_of(node).children) {
      out.push_back(nodes[static_cast<size_t>(index)]);
    }
    return out;
  }
  // Returns the hop in which a node adds its data to that of its children and sends the sum to its
  // parent; down() that in which it receives the result and sends it to its children.
  Hop up(int node, size_t segment) const {
    return {time_of(height - vertex_of(node).depth),
            segment,
            true,
            false,
            sorted(children(node)),
            parent(node)};
  }
  Hop down(int node, size_t segment, size_t levels_before) const {
    return {time_of(levels_before + vertex_of(node).depth),
            segment,
            false,
            true,
            parent(node),
            children(node)};
  }
};

// Returns all other nodes, starting with the next one, so that not all nodes send to the same node
// at once.
std::vector<int> other_nodes(int count, int me) {
  std::vector<int> out;
  for (int d = 1; d < count; ++d) out.push_back((me + d) % count);
  return out;
}

void sort_by_time(Route* route) {
  std::stable_sort(route->hops.begin(), route->hops.end(),
                   [](const Hop& a, const Hop& b) { return a.time < b.time; });
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitution = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitution, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

const char* name_of(Algorithm a) { return kAlgorithmNames[static_cast<size_t>(a)]; }

Algorithm algorithm_of(const std::string& name, const std::string& source) {
  std::string closest = kAlgorithmNames[0];
  for (size_t i = 0; i < kAlgorithmNames.size(); ++i) {
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
    if (edit_distance(name, kAlgorithmNames[i]) < edit_distance(name, closest)) {
      closest = kAlgorithmNames[i];
    }
  }
  fail_usage(source + "=" + name + ": expected auto, ring, tree or transpose; did you mean " +
             closest + "?");
}

Route exchange_route(int count, int me) {
  const std::vector<int> peers = other_nodes(count, me);
  Route out;
  out.end_time = time_of(1);
  out.hops = {{0, 0, true, false, {}, peers}, {time_of(1), 0, true, true, sorted(peers), {}}};
  return out;
}

Route transpose_route(int count, int me) {
  const std::vector<int> peers = other_nodes(count, me);
  Route out;
  out.segments = static_cast<size_t>(count);
  out.end_time = time_of(2);
  for (const int c : peers) {
    const auto segment = static_cast<size_t>(c);
    out.hops.push_back({0, segment, true, false, {}, {c}});
    out.hops.push_back({time_of(2), segment, false, true, {c}, {}});
  }
  const auto own_segment = static_cast<size_t>(me);
  out.hops.push_back({time_of(1), own_segment, true, true, sorted(peers), peers});
  sort_by_time(&out);
  return out;
}

Route ring_route(int count, int me) {
  const int last = 2 * count - 2, previous = (me + count - 1) % count, next = (me + 1) % count;
  Route out;
  out.segments = static_cast<size_t>(count);
  out.end_time = static_cast<size_t>(last);
  // The time that the partial sums of a chunk take: while they travel around the ring, so do the
  // results of the previous chunk.
  out.stride = static_cast<size_t>(count);
  for (int t = 0; t <= last; ++t) {
    const int segment = (me + 2 * count - 1 - t) % count;
    const bool adds = t < count;
    Hop hop{static_cast<size_t>(t), static_cast<size_t>(segment), adds, t + 1 >= count, {}, {}};
    if (t > 0) hop.sources = {previous};
    if (t < last) hop.targets = {next};
    out.hops.push_back(hop);
  }
  return out;
}

Route tree_route(int count, int me) {
  // In the second tree, the order of the nodes is reversed if their number is even, and rotated by
  // one if it is odd. Leaves of one tree are then inner nodes of the other.
  const Tree trees[] = {Tree(count, [](int c) { return c; }), Tree(count, [count](int c) {
                          return count % 2 == 0 ? count - 1 - c : (c + 1) % count;
                        })};
  Route out;
  out.segments = 2;
  for (size_t s = 0; s < out.segments; ++s) {
    Hop up = trees[s].up(me, s);
    Hop down = trees[s].down(me, s, trees[s].height);
    out.end_time = std::max(out.end_time, time_of(2 * trees[s].height));
    if (down.sources.empty()) {  // the root has the result already
      up.is_result = true;
      up.targets = down.targets;
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
  out.end_time = time_of(tree.height);
  out.hops = {tree.up(me, 0)};
  out.hops[0].is_result = me == root;
  return out;
}

Route broadcast_route(int count, int me, int root) {
  const Tree tree = Tree::with_root(count, root);
  Route out;
  out.end_time = time_of(tree.height);
  out.hops = {tree.down(me, 0, 0)};
  return out;
}

// The root of a range of positions 1, 2, 3, ... is the position divisible by the largest power of
// two. Its children are the roots of the ranges on both sides.
std::vector<TreeVertex> binary_tree(int count) {
  std::vector<TreeVertex> vertices(static_cast<size_t>(count));
  const auto grow = [&vertices](const auto& self, int lo, int hi, int parent,
                                size_t depth) -> void {
    if (lo >= hi) return;
    int root = lo;
    for (int i = lo; i < hi; ++i) {
      if (((i + 1) & -(i + 1)) > ((root + 1) & -(root + 1))) root = i;
    }
    vertices[static_cast<size_t>(root)] = {parent, {}, depth};
    if (parent >= 0) vertices[static_cast<size_t>(parent)].children.push_back(root);
    self(self, lo, root, root, depth + 1);
    self(self, root + 1, hi, root, depth + 1);
  };
  grow(grow, 0, count, -1, 0);
  return vertices;
}

}  // namespace fsccl
