// Makes the libtorch of a process report version 2.1.0. tests/libtorch.rs and tests/interop/wheel.py preload it.
#include <map>
#include <string>

namespace caffe2 {
const std::map<std::string, std::string>& GetBuildOptions() {
  static const std::map<std::string, std::string> options{{"TORCH_VERSION", "2.1.0"}};
  return options;
}
}  // namespace caffe2
