// Does not compile: line 4 uses a name that nobody declared.

extern "C" __global__ void wrong(float* out, int n) {
  out[threadIdx.x] = undeclared;
}
