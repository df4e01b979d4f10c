// The boundary to Rust: catches every C++ exception.
#pragma once

#include <cstring>
#include <exception>

#include <c10/util/Exception.h>

// Returns null, or the reason why `f` failed: a message to be freed with ddp_free_message.
template <typename F>
char* guarded(F&& f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const c10::Error& e) {
    return strdup(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return strdup(e.what());
  } catch (...) {
    return strdup("unknown C++ exception");
  }
}
