// The whole command line as a function, for programs that add components of their own to it.
#pragma once

namespace tapetune {

// To be called first in main(), with what is added to the registries of adapters/component.h before. The exit code.
int run_cli(int argc, char** argv);

}  // namespace tapetune
