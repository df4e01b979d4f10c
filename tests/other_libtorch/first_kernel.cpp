// Says on which thread MKL chooses its kernels for elementwise functions.
#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>

namespace {

int say() {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof name);
  std::fprintf(stderr, "MKL has chosen its kernels on thread %s\n", name);
  return 0;
}

}  // namespace

// MKL's function, whose first call chooses.
extern "C" int mkl_vml_serv_cpu_detect() {
  static int said = say();
  static auto detect = reinterpret_cast<int (*)()>(dlsym(RTLD_NEXT, "mkl_vml_serv_cpu_detect"));
  (void)said;
  return detect();
}
