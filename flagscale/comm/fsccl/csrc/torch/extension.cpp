// The one translation unit of the torch side: torch's headers take most of the time of compiling
// it, so they are read once.
#include "backend.cpp"
#include "module.cpp"
#include "operations.cpp"
