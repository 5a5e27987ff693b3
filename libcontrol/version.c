/*
 * Embeds the release in the library, so that it can be read in a container that has been running
 * for a long time: strings libcuda.so.1 | grep tidegate-control
 */
__attribute__((used)) static const char version[] = "tidegate-control " TIDEGATE_VERSION;
