#pragma once

#include <nanobind/nanobind.h>

// Adds RowReplies to the module.
void bind_resp(nanobind::module_& m);
