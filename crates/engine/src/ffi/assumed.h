// What the C++ of this crate assumes of libtorch, checked when it is compiled. A libtorch that differs is then an error
// with words, and not a crash.
#pragma once

// Ahead of all other headers, which may fail to compile where the version is another.
#include <torch/version.h>

static_assert(TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 11 || TORCH_VERSION_MINOR == 13),
              "ddp-mp knows libtorch 2.11 (tch 0.24) and 2.13 (tch 0.26), and this is another one. Let LIBTORCH name the folder of "
              "the one that fits the tch in Cargo.lock, or unset LIBTORCH and run `make libtorch`");

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

// tch's C_tensor is a pointer to an at::Tensor, and the files of ffi/ pass such pointers on.
static_assert(sizeof(at::Tensor) == sizeof(void*), "at::Tensor is more than a pointer");
static_assert(sizeof(at::Generator) == sizeof(void*), "at::Generator is more than a pointer");

// AutocastState in ffi/autocast.rs.
static_assert(std::is_same_v<std::underlying_type_t<c10::ScalarType>, int8_t>, "c10::ScalarType is not an i8");

namespace {

// Call in ffi/c10d.rs, and Reduce in ffi/gloo.
using RedOpType = c10d::ReduceOp::RedOpType;
static_assert(std::is_same_v<std::underlying_type_t<RedOpType>, uint8_t>, "c10d::ReduceOp::RedOpType is not a u8");
static_assert(RedOpType::SUM == 0 && RedOpType::PRODUCT == 2 && RedOpType::MIN == 3 && RedOpType::MAX == 4 &&
                  RedOpType::BAND == 5 && RedOpType::BOR == 6 && RedOpType::BXOR == 7,
              "c10d numbers its reductions otherwise than `Reduce` in ffi/gloo");

// gloo_forward declares Gloo's classes without their layouts, so libtorch must hold them by pointer.
static_assert(std::is_same_v<decltype(c10d::ProcessGroupGloo::Options::devices),
                             std::vector<std::shared_ptr<::gloo::transport::Device>>>,
              "ProcessGroupGloo::Options does not hold Gloo's devices by pointer");

}  // namespace
