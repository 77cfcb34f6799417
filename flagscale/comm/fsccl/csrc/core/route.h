// Algorithms between nodes: the messages that each node sends and receives, and their order. This
// file only calculates; hierarchical_routes.cpp transfers the data. A node is a set of ranks that
// share memory; it may consist of one rank.
//
// A chunk of the buffer is divided into segments. Each segment takes its own route through the
// nodes, which consists of hops. A hop is one action of a node on a segment: it waits for messages
// from some nodes, adds its own data to them or takes the received data as the result, and sends
// that to other nodes. `time` is a logical time, the same for all nodes: every message that a hop
// waits for is sent by a hop of an earlier time. So nodes that execute their hops in the order of
// time never deadlock, also with several chunks in flight, each of which starts `stride` units of
// time after the previous one.
//
//   exchange    every node sends its data to all others and sums the received data
//   transpose   node s receives the data of segment s from all others and sends them the sum
//   ring        the partial sum of segment s travels around the ring from node s+1 to s; the result
//               then travels around the ring once more
//   tree        two binary trees, one per half of the buffer: sums go up, results go down. An inner
//               node of one tree is a leaf of the other, so that all nodes send about the same
//               amount
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
// Parses the name of an algorithm. Throws Error(kUsage) that suggests the most similar name;
// `source` is the setting that contains the name, for the message.
Algorithm algorithm_of(const std::string& name, const std::string& source);

// An action of one node on one segment.
struct Hop {
  size_t time = 0;
  size_t segment = 0;
  // Adds the data of this node to the received data; otherwise the received data is the result.
  bool adds_own_data = false;
  bool is_result = false;             // the data that is sent is the result
  std::vector<int> sources, targets;  // nodes from which it receives, and to which it sends
};

// All hops of one node for a chunk.
struct Route {
  size_t segments = 1;    // per chunk
  size_t stride = 1;      // time between the starts of consecutive chunks
  size_t end_time = 0;    // time of the last hop of any node
  std::vector<Hop> hops;  // in the order of time
};

// Return the route of node `me` of `count` nodes, at least two. `root` is a node.
Route exchange_route(int count, int me);
Route transpose_route(int count, int me);
Route ring_route(int count, int me);
Route tree_route(int count, int me);
Route reduce_route(int count, int me, int root);
Route broadcast_route(int count, int me, int root);

// Vertex of a binary tree. The parent of the root is -1.
struct TreeVertex {
  int parent = -1;
  std::vector<int> children;
  size_t depth = 0;
};
// Returns a binary tree of `count` vertices, at least every other of which is a leaf.
std::vector<TreeVertex> binary_tree(int count);

}  // namespace fsccl
