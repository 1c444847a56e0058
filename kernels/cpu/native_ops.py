from kernels.cpu.attention import paged_attention, write_kv
from kernels.cpu.elementwise import *
from kernels.cpu.native import linear
