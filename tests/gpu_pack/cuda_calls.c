/* Counts the calls that a program makes of the CUDA runtime: preloaded before libcudart.so.13, whose functions it wraps.

   CUDA_CALLS names a file; beside it, one file for each process gets the counts as 64-bit numbers in the order of NAMES, so
   that they are there however the process ends. A wrapper changes no argument: it adds one, and jumps on. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define NAMES(X) \
  X(0, __cudaLaunchKernel) X(1, cudaLaunchKernel) X(2, cudaLaunchKernelExC) X(3, cudaGraphLaunch) \
  X(4, cudaMemcpyAsync) X(5, cudaMemsetAsync) \
  X(6, cudaStreamSynchronize) X(7, cudaEventSynchronize) X(8, cudaDeviceSynchronize) X(9, cudaMemcpy) \
  X(10, cudaMalloc) X(11, cudaFree) X(12, cudaHostAlloc) X(13, cudaFreeHost) \
  X(14, cudaEventQuery) X(15, cudaEventRecord) X(16, cudaEventRecordWithFlags)

enum { COUNT = 17 };

__attribute__((visibility("hidden"))) unsigned long *cuda_call_counts;
__attribute__((visibility("hidden"))) void *cuda_call_real[COUNT];

/* r10 and r11 are free where a function begins. */
#define WRAPPER(number, name) \
  __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n" \
          "  movq cuda_call_counts(%rip), %r11\n" \
          "  lock incq 8*" #number "(%r11)\n" \
          "  leaq cuda_call_real(%rip), %r11\n" \
          "  jmp *8*" #number "(%r11)\n");
NAMES(WRAPPER)

__attribute__((constructor)) static void begin(void) {
  static unsigned long unwatched[COUNT];
  cuda_call_counts = unwatched;
#define FIND(number, name) cuda_call_real[number] = dlsym(RTLD_NEXT, #name);
  NAMES(FIND)
  const char *prefix = getenv("CUDA_CALLS");
  char path[4096];
  if (prefix == NULL) return;
  snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof unwatched) != 0) return;
  void *counts = mmap(NULL, sizeof unwatched, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (counts != MAP_FAILED) cuda_call_counts = counts;
}
