// All C++ of this crate, compiled at once: libtorch's headers are then read once, which halves the time.

#include "c10d.cpp"
#include "kept_memory.cpp"
#include "shim.cpp"
