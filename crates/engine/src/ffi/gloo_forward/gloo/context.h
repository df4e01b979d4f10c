// Declarations of Gloo for libtorch's ProcessGroupGloo.hpp. Gloo is inside libtorch_cpu, but the wheels do not ship its
// headers. These are names only, without layouts. That is enough: the class holds Gloo's objects only by shared_ptr and
// unique_ptr, so its layout does not depend on theirs. All code that uses their layouts is compiled into libtorch_cpu.
// Functions that the header calls, or overrides, are declared. ../assumed.h says for which versions of libtorch.
// The tests of gloo.rs run every call.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport
}  // namespace gloo
