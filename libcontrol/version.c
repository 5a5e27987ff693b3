/*
 * Shows which release has taken libcuda's place in a container, which may have run for long:
 * strings libcuda.so.1 | grep tidegate-control
 */
__attribute__((used)) static const char version[] = "tidegate-control " TIDEGATE_VERSION;
