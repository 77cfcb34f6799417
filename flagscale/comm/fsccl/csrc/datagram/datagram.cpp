// The whole of this directory, as core.cpp is of the core, of which it is a part. Names in anonymous
// namespaces are unique over all files.
#include "endpoint.cpp"
#include "group_tail.cpp"
#include "session.cpp"
#include "socket.cpp"
#include "tail.cpp"
#include "transfer.cpp"
