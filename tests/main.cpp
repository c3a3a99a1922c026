#ifdef TAPETUNE_CATCH2_V2
#define CATCH_CONFIG_RUNNER
#endif
#include "../examples/own-method/ia3.h"
#include "catch.h"
#include "core/signals.h"

int main(int argc, char** argv) {
  tapetune::catch_signals();
  add_ia3();  // a component from outside, to which every test applies
  return Catch::Session().run(argc, argv);
}
