// The whole of this directory as one translation unit, as core.cpp is of the core, with which it is
// linked. Names in anonymous namespaces are unique over all files.
#include "session.cpp"
#include "transfer.cpp"
