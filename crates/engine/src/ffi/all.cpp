// All C++ of this crate as one translation unit: libtorch's headers are then parsed once, which halves the time.

#include "assumed.h"

#include "c10d.cpp"
#include "kept_memory.cpp"
#include "library.cpp"
#include "shim.cpp"
