# Read at the project's beginning: with what this finds, nanobind builds by the stable ABI where Python has it (3.12).
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
