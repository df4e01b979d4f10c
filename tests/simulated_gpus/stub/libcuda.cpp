// The libcuda.so of the CUDA toolkit, with which programs are linked where no driver is. Every function fails.

extern "C" {

constexpr int STUB_LIBRARY = 34;

int cuInit(unsigned) { return STUB_LIBRARY; }
int cuDriverGetVersion(int*) { return STUB_LIBRARY; }

}  // extern "C"
