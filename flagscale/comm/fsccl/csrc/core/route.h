// Algorithms between nodes: which node sends which data to which, and in which order. Pure
// arithmetic; hierarchical_routes.cpp moves the bytes. Where every rank is a node of its own, nodes
// are ranks.
//
// A chunk of the buffer is cut into segments, each of which takes its own route through the nodes.
// A hop is one action of a node on a segment: it waits for messages from some nodes, adds its own
// data to them or takes the received data as the result, and sends that to other nodes. `time` is a
// logical time, the same for all nodes: every message that a hop waits for is sent by a hop of an
// earlier time. So nodes that execute their hops in the order of time never deadlock, also with
// several chunks in flight, each of which starts `stride` after the previous one.
//
//   exchange    every node sends its data to all others and sums the received data
//   transpose   node s receives all data of segment s and sends the sum to all others
//   ring        segment s is summed from node s+1 around to s; the sum then travels around as far
//   tree        two binary trees, one per half of the buffer: sums go up, results go down. A node
//               that is inside one tree is a leaf of the other, so that all nodes send about
//               equally much
//   reduce      up one tree to the node of the root
//   broadcast   down one tree from the node of the root
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fsccl {

// Value of FSCCL_ALGO, for all_reduce.
enum class Algorithm { kAuto, kRing, kTree, kTranspose };
const char* name_of(Algorithm a);
// Parses a name. Throws Error(kUsage) that suggests the closest name; `source` is where the user
// has set it.
Algorithm algorithm_of(const std::string& name, const std::string& source);

// An action of one node on one segment.
struct Hop {
  size_t time = 0;
  size_t segment = 0;
  // Adds the data of this node to the received data; otherwise the received data is the result.
  bool adds_own = false;
  bool is_result = false;             // the data that is sent is the result
  std::vector<int> sources, targets;  // nodes
};

// All hops of one node for a chunk.
struct Route {
  size_t segments = 1;
  size_t stride = 1;
  size_t end_time = 0;    // time of the last hop of any node
  std::vector<Hop> hops;  // in the order of time
};

// Routes of node `me` of `count`, at least two.
Route exchange_route(int count, int me);
Route transpose_route(int count, int me);
Route ring_route(int count, int me);
Route tree_route(int count, int me);
Route reduce_route(int count, int me, int root);
Route broadcast_route(int count, int me, int root);

// A binary tree of `count` vertices, at least every other of which is a leaf. The parent of the
// root is -1.
struct TreeVertex {
  int parent = -1;
  std::vector<int> children;
  size_t depth = 0;
};
std::vector<TreeVertex> binary_tree(int count);

}  // namespace fsccl
