#pragma once

// Adds `adapter: {type: ia3, targets: [k, v, down]}`.
void add_ia3();
