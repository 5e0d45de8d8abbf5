// Assembles for sm_100a and sm_103a only.

extern "C" __global__ void tensor_memory() {
  asm volatile("tcgen05.wait::ld.sync.aligned;");
}
