/* What a step function calls in an executable. */
typedef unsigned long long u64;
static int barriers;
void rc_barrier(const void *ctx, unsigned thread, unsigned threads) { barriers++; }
void rc_profile(const void *ctx, unsigned thread, unsigned region) { (*(u64 **)((char *)ctx + PROFILE))[region]++; }
int test_barriers(void) { return barriers; }
