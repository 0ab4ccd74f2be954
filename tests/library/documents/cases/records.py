"""Tables of text as programs export them."""

from documents.cases import Case


def lines(text, encoding="utf-8"):
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))


ONE_BAD = "name,price\nCafé,3\nBœuf,4\nGr".encode() + b"\xfc" + b"n,5\n"

CASES = [
    Case("any columns", "prices.csv", lines("name,price\nKettle,30\nLamp,12\n"),
         kept=("name: Kettle | price: 30", "name: Lamp | price: 12")),
    Case("any columns", "capitals.csv", lines("Text,Harbour\nThe ferry leaves at 9.,Lund\n"),
         kept=("The ferry leaves at 9.", "Harbour: Lund"), invented=("Text:",)),
    Case("any columns", "index.csv", lines(",name,age\n0,Ann,31\n1,Bob,42\n"),
         kept=("0 | name: Ann | age: 31",)),
    Case("any columns", "twice.csv", lines("team,goals,goals\nLund,1,2\n"),
         kept=("team: Lund", "goals", "1", "goals", "2")),
    Case("any columns", "no-names.csv", lines("Ann,31,Bergen\nBob,42,Lund\n"),
         kept=("Ann | 31 | Bergen", "Bob | 42 | Lund"), invented=("Ann: ", "31: ")),
    Case("any columns", "years.csv", lines("product,2023,2024\nCable,5,6\n"),
         kept=("product: Cable | 2023: 5 | 2024: 6",)),
    Case("any columns", "prose.csv", lines("text\nSalt, and more; much more\n"),
         kept=("Salt, and more; much more",)),
    Case("separators", "sep.csv", lines("sep=;\nname;price\nKettle;30,50\n"),
         kept=("name: Kettle | price: 30,50",), invented=("sep",)),
    Case("separators", "semicolons.csv", lines("Name;Preis\nTee;1,50\nSaft;2,50\n"),
         kept=("Name: Tee | Preis: 1,50",)),
    Case("separators", "tabs.csv", lines("name\tprice\nKettle, red\t30\n"),
         kept=("name: Kettle, red | price: 30",)),
    Case("separators", "bars.tsv", lines("name|price\nKettle|30\n"),
         kept=("name: Kettle | price: 30",)),
    Case("comment lines", "exported.csv", lines("# made by Kim, in May\n# v2\nname,price\nTea,3\n"),
         kept=("name: Tea | price: 3",), invented=("Kim",), said=("2 comment lines",)),
    Case("comment lines", "genes.tsv", lines("#chrom\tstart\tend\nchr1\t5\t9\n"),
         kept=("chrom: chr1 | start: 5 | end: 9",)),
    Case("comment lines", "title.csv", lines("Prices of May\n\nname,price\nTea,3\nOil,4\n"),
         kept=("Prices of May", "name: Tea | price: 3"), invented=("Prices of May:",)),
    Case("encodings", "western.csv", lines("name,price\nCafé,3 €\n", "cp1252"),
         kept=("name: Café | price: 3 €",), said=("2 characters read as CP1252",)),
    Case("encodings", "unmarked.csv", lines("name,price\nCafé,3\n", "utf-16-le"),
         kept=("name: Café | price: 3",), said=("read as UTF-16-LE",)),
    Case("encodings", "marked.csv", lines("name;price\n盐井;3\n", "utf-16"),
         kept=("name: 盐井 | price: 3",)),
    Case("encodings", "wide.csv", lines("name,price\nCafé,3\n", "utf-32-be"),
         kept=("name: Café | price: 3",), said=("read as UTF-32-BE",)),
    Case("encodings", "one-bad-byte.csv", lines(ONE_BAD),
         kept=("name: Café", "name: Gr\ufffdn | price: 5"), said=("1 byte",)),
    Case("encodings", "unknown.csv", lines("name,price\n盐井靠人力开采,3\n", "gb18030"),
         refused="are not UTF-8; name the encoding"),
    Case("encodings", "eastern.csv", lines("name,city\nzażółć,Łódź\n", "cp1250"),
         refused="are not UTF-8; name the encoding"),
]  # fmt: skip
