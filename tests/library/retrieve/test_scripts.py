"""Words of many scripts are found: with marks, points and soft hyphens, and without spaces."""

import contextlib
import re

import apsw
import pytest

from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.terms import terms

# By language: twenty words, and sentences that hold them.
SCRIPTS = {
    "Hindi": (
        "पिता माता हिन्दी नदी किताब विद्यालय चिड़िया मछली सूर्य चन्द्रमा वृक्ष पर्वत शहर गाँव दूध "
        "रोटी घोड़ा हाथी समुद्र पुल",
        ("{} के बारे में यह पाठ लिखा गया है।", "कल हमने {} देखा और घर लौट आए।", "क्या {} यहाँ है?"),
    ),
    "Tamil": (
        "சென்னை மதுரை மரம் பறவை மீன் சூரியன் நிலவு மலை ஆறு கடல் பள்ளி புத்தகம் பால் அரிசி குதிரை "
        "யானை பாலம் வீடு தாய் தந்தை",
        ("இந்தப் பக்கம் {} பற்றி எழுதப்பட்டது.", "நேற்று நாங்கள் {} பார்த்தோம்.", "இங்கே {} உள்ளதா?"),
    ),
    "Bengali": (
        "পিতা মাতা নদী বই বিদ্যালয় পাখি মাছ সূর্য চাঁদ গাছ পর্বত শহর গ্রাম দুধ রুটি ঘোড়া হাতি সমুদ্র সেতু বৃষ্টি",
        ("এই পাতাটি {} নিয়ে লেখা হয়েছে।", "গতকাল আমরা {} দেখেছি।", "এখানে কি {} আছে?"),
    ),
    "Thai": (
        "แม่น้ำ ภูเขา โรงเรียน หนังสือ ปลา นกยูง ดวงอาทิตย์ พระจันทร์ ต้นไม้ ทะเล สะพาน ช้าง ม้าลาย นมสด "
        "ขนมปัง หมู่บ้าน ฝนตก รถไฟ ยารักษา ตำรวจ",
        ("บทความนี้เขียนเกี่ยวกับ{}ในจังหวัดของเรา", "เมื่อวานเราเห็น{}แล้วกลับบ้าน", "ที่นี่มี{}หรือเปล่า"),
    ),
    "Khmer": (
        "ទន្លេ ភ្នំ សាលារៀន សៀវភៅ ត្រី បក្សី ព្រះអាទិត្យ ព្រះចន្ទ ដើមឈើ សមុទ្រ ស្ពាន ដំរី សេះ ទឹកដោះ នំប៉័ង "
        "កោះ ភ្លៀង រថភ្លើង ថ្នាំពេទ្យ ប៉ូលិស",
        ("អត្ថបទនេះសរសេរអំពី{}នៅក្នុងខេត្តរបស់យើង។", "ម្សិលមិញយើងបានឃើញ{}ហើយត្រឡប់មកវិញ។", "តើទីនេះមាន{}ទេ?"),
    ),
    "Lao": (
        "ແມ່ນ້ຳ ພູເຂົາ ໂຮງຮຽນ ປຶ້ມ ປາ ນົກຍູງ ຕາເວັນ ເດືອນເພັງ ຕົ້ນໄມ້ ທະເລ ຂົວ ຊ້າງ ມ້າ ນົມສົດ ເຂົ້າຈີ່ ໝູ່ບ້ານ ຝົນຕົກ "
        "ລົດໄຟ ຢາ ຕຳຫຼວດ",
        ("ບົດຄວາມນີ້ຂຽນກ່ຽວກັບ{}ໃນແຂວງຂອງພວກເຮົາ", "ມື້ວານນີ້ພວກເຮົາເຫັນ{}ແລ້ວກັບເມືອ", "ຢູ່ນີ້ມີ{}ບໍ"),
    ),
    "Myanmar": (
        "မြစ် တောင် ကျောင်း စာအုပ် ငါး ငှက် နေရောင် လမင်း သစ်ပင် ပင်လယ် တံတား ဆင် မြင်း နို့ ပေါင်မုန့် ရွာ မိုး ရထား "
        "ဆေး ရဲတပ်ဖွဲ့",
        ("ဤဆောင်းပါးသည်{}အကြောင်းဖြစ်သည်။", "မနေ့ကကျွန်တော်တို့{}ကိုတွေ့ခဲ့သည်။", "ဒီမှာ{}ရှိသလား။"),
    ),
    "Hebrew": (  # pointed where they stand, and asked for without points
        "נָהָר הַר בַּיִת סֵפֶר דָּג צִפּוֹר שֶׁמֶשׁ יָרֵחַ עֵץ יָם גֶּשֶׁר פִּיל סוּס חָלָב לֶחֶם כְּפָר גֶּשֶׁם רַכֶּבֶת תְּרוּפָה שׁוֹטֵר",
        ("הַדַּף הַזֶּה נִכְתַּב עַל {} בָּעִיר.", "אֶתְמוֹל רָאִינוּ {} וְחָזַרְנוּ.", "הַאִם יֵשׁ כָּאן {}?"),
    ),
    "Arabic": (  # vocalised where they stand, and asked for without vowels
        "نَهْرٌ جَبَلٌ مَدْرَسَةٌ كِتَابٌ "
        "سَمَكَةٌ طَائِرٌ شَمْسٌ قَمَرٌ شَجَرَةٌ بَحْرٌ جِسْرٌ فِيلٌ حِصَانٌ حَلِيبٌ خُبْزٌ قَرْيَةٌ مَطَرٌ قِطَارٌ دَوَاءٌ شُرْطِيٌّ",
        ("كُتِبَتْ هٰذِهِ الصَّفْحَةُ عَنْ {} فِي الْمَدِينَةِ.", "رَأَيْنَا أَمْسِ {} ثُمَّ عُدْنَا.", "هَلْ هُنَا {}؟"),
    ),
    "German": (  # a bar is a soft hyphen where they stand
        "Donau|dampf|schiff|fahrt Bahn|hof Kinder|garten Zug|verspätung Rechts|anwalt Straßen|bahn "
        "Kranken|haus Geburts|tag Wasser|kraft|werk Apfel|baum Biblio|thek Brief|träger Dach|boden "
        "Feuer|wehr Garten|zaun Hand|schuh Kühl|schrank Licht|schalter Milch|kanne Uhr|werk",
        ("Dieses Blatt han|delt von {} in der Stadt.", "Gestern sahen wir {}.", "Gibt es hier {}?"),
    ),
}
POINTS = re.compile("[\u0591-\u05bd\u05c1\u05c2\u064b-\u0652|]")


@pytest.mark.parametrize("language", SCRIPTS)
def test_the_document_with_the_word_is_first(language):
    words, sentences = SCRIPTS[language]
    words = words.split()
    assert len(words) == 20
    texts = {i: sentences[i % 3].format(word) for i, word in enumerate(words)}
    texts |= {100 + i: 3 * it.format("") for i, it in enumerate(sentences)}
    texts = {i: text.replace("|", "\u00ad") for i, text in texts.items()}
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        index = BM25Index(connection)
        index.create()
        index.add(texts)
        asked = [POINTS.sub("", word) for word in words]
        assert [next(iter(index.search(word, 1)), None) is not None for word in asked] == 20 * [
            True
        ]
        assert [index.search(word, 1)[0].chunk_id for word in asked] == list(range(20))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("हिन्दी पिता।", ["हिन्दी", "पिता"]),
        ("zero\u200bwidth \ufeffmark e\u0301", ["zerowidth", "mark", "e"]),
        ("Silben\u00ad\ntrennung", ["silbentrennung"]),
        ("آخر أحمد عربى مدرسة", ["اخر", "احمد", "عربي", "مدرسه"]),
        ("ไป 5๕", ["ไ", "ป", "ไป", "5๕"]),
        ("ខ្មែរ", ["ខ្មែ", "រ", "ខ្មែរ"]),
        ("1\ufe0f\u20e3 x\u20d7", ["1", "x"]),
        ("\u0941", []),
    ],
)
def test_terms_of_marks_and_of_what_is_dropped(text, expected):
    assert terms(text) == expected
