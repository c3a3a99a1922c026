// Declarations that ProcessGroupGloo.hpp names, because LibTorch's wheel carries Gloo's code but not its headers.
// Gloo's types stay behind pointers: only distributed/gloo.cpp sees these five files, and nothing of Gloo's is laid out
// by them; of what it throws, the type's name counts.
#pragma once
