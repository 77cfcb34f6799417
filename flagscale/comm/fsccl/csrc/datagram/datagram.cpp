// All sources of this directory, as a part of core.cpp. Names in anonymous namespaces are unique
// across all files of the core.
#include "endpoint.cpp"
#include "group_bounded_all_reduce.cpp"
#include "session.cpp"
#include "socket.cpp"
#include "bounded_all_reduce.cpp"
#include "transfer.cpp"
