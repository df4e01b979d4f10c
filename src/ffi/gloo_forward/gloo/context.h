// What libtorch's ProcessGroupGloo.hpp needs to know of Gloo, which is inside libtorch_cpu but whose headers the
// wheels do not ship: names only, and no layout of anything. That is enough, because the class holds what is
// Gloo's by shared_ptr and unique_ptr alone, so its own layout does not depend on it, and because everything that
// looks inside has been compiled into libtorch_cpu. Where the header itself calls a function or overrides a
// virtual one, that one is declared. Tied to the version of libtorch that Cargo.toml pins; the tests of gloo.rs
// run every call.
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
