// tapetune with one adapter more: IA3.
#include <cli/run.h>

#include "ia3.h"

int main(int argc, char** argv) {
  add_ia3();
  return tapetune::run_cli(argc, argv);
}
