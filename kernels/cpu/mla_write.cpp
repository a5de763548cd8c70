// Rows of this step into the pages of their requests: the bytes of a row, wherever its place lies.
#include "arguments.h"
#include "vectors.h"

// latent, pages, table [R, P], seen [R], cu [R + 1], then R, bytes of a row, tokens of a page, and in bytes the strides of
// latent's rows, of pages and of rows in a page, then the stride of table's rows.
K3_EXPORT int64_t k3_mla_write(const char* packed) {
  k3::Arguments of{packed};
  const char* latent = of;
  char* pages = of;
  const int64_t *table = of, *seen = of, *cu = of;
  const int64_t requests = of, bytes = of, size = of, row = of, page = of, page_row = of, table_row = of;
  for (int64_t r = 0; r < requests; r++)
    for (int64_t t = cu[r]; t < cu[r + 1]; t++) {
      const int64_t token = seen[r] + t - cu[r];
      std::memcpy(pages + table[r * table_row + token / size] * page + token % size * page_row, latent + t * row, bytes);
    }
  return 0;
}
