#define PTQ_ISA kPortable
#define PTQ_TABLE kKernelsPortable
#include "isa.inc"
