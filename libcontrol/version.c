/*
 * Which release a container has in libcuda's place, for a person who looks at one that has run for
 * long: strings libcuda.so.1 | grep tidegate-control
 */
__attribute__((used)) static const char version[] = "tidegate-control " TIDEGATE_VERSION;
