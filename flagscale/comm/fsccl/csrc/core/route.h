// The algorithms between clusters: which of them sends what to which, and in which order. Only
// arithmetic; hierarchy_routes.cpp moves the bytes, and where every rank is a cluster of its own,
// clusters are ranks.
//
// A chunk of the buffer is cut in segments, each of which takes a way of its own through the
// clusters. A hop is what a cluster does for a segment at once: it waits for messages from some
// clusters, adds its own data to them or takes what has come for the result, and sends that on to
// others. `at` is a time, the same for all clusters: whatever a hop waits for is sent by hops of an
// earlier time, so clusters that take their hops in the order of time never wait in a circle, also
// where several chunks, of which each begins `stride` after the one before, are under way at once.
//
//   exchange    everyone sends its data to all others and adds up what comes
//   transpose   cluster s gets all data of segment s, and sends the sum to all others
//   ring        segment s is summed from cluster s+1 around to s, and its sum goes around as far
//   tree        two binary trees, each for a half: sums go up, results down. Who is inside one tree
//               is a leaf of the other, so that all send about as much
//   reduce      up one tree to the cluster of the root
//   broadcast   down one tree from there
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fsccl {

// What FSCCL_ALGO names, for all_reduce.
enum class Algorithm { kAuto, kRing, kTree, kTranspose };
const char* name_of(Algorithm a);
// Throws Error(kUsage) with the nearest name there is; `where` the user has set it.
Algorithm algorithm_of(const std::string& name, const std::string& where);

struct Hop {
  size_t at = 0;
  size_t segment = 0;
  bool adds = false;          // the own data to what has come; else that is the result
  bool ends = false;          // what is sent on is the result
  std::vector<int> from, to;  // clusters
};

// All that one cluster does for a chunk.
struct Route {
  size_t segments = 1;
  size_t stride = 1;
  size_t end = 0;          // the time of the last hop of any cluster
  std::vector<Hop> hops;  // in the order of time
};

// Of cluster `me` of `count`, two at least.
Route exchange_route(int count, int me);
Route transpose_route(int count, int me);
Route ring_route(int count, int me);
Route tree_route(int count, int me);
Route reduce_route(int count, int me, int root);
Route broadcast_route(int count, int me, int root);

// A binary tree of `count` nodes in which at least every other one is a leaf; the root is the one
// whose `parent` is -1.
struct TreeNode {
  int parent = -1;
  std::vector<int> children;
  size_t depth = 0;
};
std::vector<TreeNode> binary_tree(int count);

}  // namespace fsccl
